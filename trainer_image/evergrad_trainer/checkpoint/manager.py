"""When and what to save, what to do when that fails, what to load at a start: the policy over a store."""

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from evergrad_common.contract import ErrorKind
from evergrad_manifest.training import Checkpoint
from evergrad_trainer.base.errors import PeerLostError, SaveError
from evergrad_trainer.base.records import EventType
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.dcp_storage import plan_snapshot
from evergrad_trainer.checkpoint.fence import Fence
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.restore import Restored, load_newest
from evergrad_trainer.checkpoint.save import (
    BackgroundSave,
    PublishedCheckpoint,
    SaveOrder,
    SaveResult,
    find_newest_valid,
    ignore_solo_warning,
    run_save,
)
from evergrad_trainer.checkpoint.search import Search
from evergrad_trainer.checkpoint.staging import HostStager, require_tensors
from evergrad_trainer.checkpoint.store import CheckpointStore, open_store
from evergrad_trainer.distributed.world import Membership, World

_JOIN_SECONDS = 0.02
"""How often a wait for a save looks whether its world was given up."""

_log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A save that has begun and is not yet reported."""

    background: BackgroundSave
    blocking_seconds: float
    best: bool

    def join(self, world: World) -> None:
        """Wait for its end. Raises PeerLostError when it cannot end because the world was given up."""
        if world.interrupt is None:
            self.background.join()
            return
        # In short waits: the thread may hang on a lost peer until the group's timeout, which is far longer
        # than the others wait for this process.
        while not self.background.is_done:
            if world.interrupt.is_overdue:
                raise PeerLostError("the group was given up during a save")
            self.background.join(_JOIN_SECONDS)


class CheckpointManager:
    """One process's part in its run's checkpoints. Used from the main thread; every rank makes the same calls
    in the same order.

    ``membership.world`` is read at each call and kept no longer than one save. ``on_event(type, fields)`` is
    called from here only, never from the background thread.
    """

    def __init__(
        self,
        directory: Path,
        *,
        membership: Membership,
        settings: Checkpoint,
        identity: Identity,
        on_event: Callable[[str, dict[str, Any]], None],
        store: CheckpointStore | None = None,
    ) -> None:
        self.published: PublishedCheckpoint | None = None
        """Newest checkpoint that this process has saved since its last restore; the same on every rank."""
        self.failures = 0
        """Saves that have failed in a row."""
        self.anchors: frozenset[int] = frozenset()
        """Steps whose checkpoints retention leaves, however old they are."""
        self._directory = directory
        self._membership = membership
        self._settings = settings
        self._identity = identity
        self._on_event = on_event
        self._store = store or open_store(directory)
        self._stager = HostStager()
        self._fence = Fence(directory, membership)
        self._flight: _Flight | None = None
        self._fallbacks: list[dict[str, Any]] = []
        self._serial = 0
        self._has_warned_of_room = False

    def enter_world(self, *, failures: int, saves: int = 0) -> None:
        """Begin to save in ``membership.world``, which is new. ``failures``: in a row so far, as the ranks
        have agreed; ``saves``: how many this generation may have seen already."""
        self._serial = saves
        self.failures = failures

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._flight is not None and not self._flight.background.is_done

    def is_fenced(self) -> bool:
        """Whether this rank has seen a newer process claim the directory; travels in the agreed flags."""
        return self._fence.is_known

    def save(
        self,
        step: int,
        state: Mapping[str, torch.Tensor],
        *,
        extra: dict[str, Any],
        best: bool = False,
        wait: bool = False,
    ) -> float:
        """Save ``state`` and ``extra`` (JSON values) as they are now; seconds that training stood still.

        Waits first for a save that is still under way. With ``wait``, or where saving is not asynchronous,
        returns when the checkpoint is published or has failed (see ``published``). A failure is an event;
        SaveError only after several in a row. Raises FencedError, on all ranks, once a newer process has
        claimed the directory; TypeError or ValueError for a state or an ``extra`` that cannot be stored.
        """
        started = time.monotonic()
        # A mistake of the caller is raised before anything is waited for or sent.
        require_tensors(state)
        copied: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))

        # There is one host buffer and one group for saves: the save before this one must have ended.
        self.land()
        self._fence.agree()

        world = self._membership.world
        self._serial += 1
        order = SaveOrder(
            version=Version(step, world.generation, self._serial),
            identity=self._identity,
            extra=copied,
            best=best,
            keep=self._settings.keep,
            rank=world.rank,
            world_size=world.size,
            group=world.checkpoint,
            anchors=self.anchors,
        )
        ignore_solo_warning()
        planner = plan_snapshot(self._stager, state, rank=world.rank, world_size=world.size)
        run = functools.partial(run_save, self._store, order, planner)
        is_background = self._settings.asynchronous and not wait
        background = BackgroundSave(run, name=f"checkpoint-{step}", yields=is_background)
        flight = self._flight = _Flight(background, time.monotonic() - started, best)

        if not is_background:
            flight.join(world)
            flight.blocking_seconds = time.monotonic() - started
            self.wait()
        return flight.blocking_seconds

    def mark_best(self, step: int) -> None:
        """Make the checkpoint of ``step``, saved already, the best one; waits for its save if that is under
        way.

        Every rank calls this; rank 0 writes, where it is not marked yet. Trouble of the volume is reported by
        an event: the checkpoint is no worse for it.
        """
        self.land()
        if not self._membership.world.is_main:
            return
        try:
            self._store.catalog.mark_best(step)
        except OSError as error:
            message = f"step {step} could not be marked as the best checkpoint: {error}"
            self._on_event(EventType.WARNING, {"message": message})

    def poll(self) -> None:
        """Report a save that has ended since the last call. To be called each step; costs next to nothing.

        Raises SaveError after too many failures in a row. A newer claim on the directory is not raised here
        but shown by ``is_fenced``, because ranks notice it at different steps.
        """
        if self._flight is not None and self._flight.background.is_done:
            self.land()
        # One rank asks the volume: a thousand would be a load on it, and the loop's flags carry the answer.
        if self._membership.world.is_main:
            self._fence.look()

    def wait(self) -> None:
        """Wait for a save under way and report it. Raises SaveError; FencedError if it met a newer claim."""
        outcome = self.land()
        if outcome is not None and outcome.fenced is not None:
            raise outcome.fenced

    def restore(
        self, state: Mapping[str, torch.Tensor], *, ahead: HeldFiles | None = None
    ) -> Restored | None:
        """Load the newest checkpoint that validates into ``state`` in place, all ranks together; None if
        there never was one.

        ``ahead``: the newest checkpoint's files, where this process has begun to read them already. First
        removes what killed processes left behind. Damaged checkpoints go to ``quarantine/``, each with an
        event. Raises CheckpointError if there are checkpoints and none can be used, or if they are not this
        run's.
        """
        world = self._membership.world
        self.published = None  # may be damaged by now, and set aside: what is loaded counts
        if world.is_main:
            try:
                self._store.attempts.clean(world.generation)
            except OSError as error:
                # Rubbish takes room and does no other harm.
                _log.warning(
                    "what an earlier process left behind could not be removed: %s", error
                )
        search = Search(
            self._store,
            checksums=self._settings.verify == "always",
            identity=self._identity,
            may_quarantine=True,
            ahead=ahead,
        )
        found = load_newest(search, state, world=world)
        if found is None:
            return None
        restored, rejected = found
        for passed in rejected:
            self._report_fallback(asdict(passed))
        self._on_event(
            EventType.RESTORED,
            {"checkpoint": restored.path.name, "seconds": restored.seconds},
        )
        return restored

    def note_announced(self) -> None:
        """The events of this world's start are written; called by every rank, once a step is trained.

        Rank 0 also reports what a process has set aside that was lost before it had written so.
        """
        if not self._membership.world.is_main:
            return
        noted = self._store.catalog.noted_fallbacks()
        for fields in noted:
            if fields not in self._fallbacks:
                self._report_fallback(fields)
        try:
            if noted:
                self._store.catalog.forget_fallbacks()
        except OSError as error:
            # The next start reports them again, which does no harm.
            _log.warning("%s: %s", self._directory, error)

    def _report_fallback(self, passed: Mapping[str, Any]) -> None:
        self._fallbacks.append(dict(passed))
        fields = {key: value for key, value in passed.items() if key != "step"}
        self._on_event(EventType.FALLBACK, fields)

    def close(self) -> None:
        """Wait for a save under way, report it and give the memory back. Raises as ``wait`` does."""
        try:
            self.wait()
        finally:
            self._stager.release()

    def abandon(self, *, patience_seconds: float = 5.0) -> None:
        """Give up a save whose world has ended, or leave in an exception's path.

        A save that ends within the patience is reported; one that hangs is left behind and is no failure: the
        next world saves again. Its thread may wait for a peer that is gone; it never keeps the process from
        ending.
        """
        # Forgotten first: an error on the way must not make a later call wait for this save again.
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.background.join(patience_seconds)
            if flight.background.is_done:
                self._report(flight)
            else:
                # The thread may still read what the old one holds.
                self._stager = HostStager()

    def land(self) -> SaveResult | None:
        """Wait for the save under way, if any, and report it; how it ended. Raises SaveError.

        A newer claim is not raised: ranks may have noticed the end of the save one after the other.
        """
        flight = self._flight
        if flight is None:
            return None
        flight.join(self._membership.world)
        self._flight = None
        outcome = self._report(flight)
        # A fenced save is no failure of the volume; ``wait`` raises its own error.
        if self.failures >= self._settings.max_failures and outcome.fenced is None:
            kind = ErrorKind.ENVIRONMENT if outcome.is_of_host else ErrorKind.INTERNAL
            raise SaveError(self._describe_failed_saves(outcome), kind, outcome.trouble)
        return outcome

    def _describe_failed_saves(self, outcome: SaveResult) -> str:
        """What happened, where a restart would continue, and what to do."""
        times = "save has" if self.failures == 1 else "saves in a row have"
        text = f"{self._directory}: {self.failures} {times} failed; the last one: {outcome.reason}."
        # One rank looks, and it speaks for all.
        newest = None
        if self._membership.world.is_main:
            newest = find_newest_valid(self._store)
        if newest is not None:
            text += f" The newest valid checkpoint is {newest}, and a restart continues from it."
        if outcome.trouble == "no_space":
            return (
                f"{text} Delete what is not needed on the volume, or enlarge the volume or its quota; "
                "then start the run again"
            )
        return f"{text} Check the volume; then start the run again"

    def _report(self, flight: _Flight) -> SaveResult:
        """Count a save that has ended and make it an event."""
        outcome = flight.background.outcome
        # A second try has used the serial behind its own.
        self._serial += outcome.serials - 1
        published = outcome.published
        if published is not None:
            self.failures = 0
            self.published = published
            fields: dict[str, Any] = {
                "checkpoint": published.path.name,
                "seconds": published.seconds,
                "blocking_seconds": flight.blocking_seconds,
                "bytes": published.bytes,
                "kept": outcome.kept,
                "best": flight.best,
            }
            if outcome.removed:
                fields["removed"] = outcome.removed
            self._on_event(EventType.SAVE, fields)
            self._warn_of_removal(outcome)
            return outcome

        # A lost peer ends this world, and the next one saves again: that counts for no failure.
        if not (outcome.is_peer_lost and self._membership.world.interrupt is not None):
            self.failures += 1
        self._fence.note(outcome.fenced)
        fields = {
            "reason": outcome.reason,
            "trouble": outcome.trouble,
            "failures": self.failures,
            "blocking_seconds": flight.blocking_seconds,
        }
        self._on_event(EventType.SAVE_FAILED, fields)
        self._warn_of_removal(outcome)
        return outcome

    def _warn_of_removal(self, outcome: SaveResult) -> None:
        """Report the first checkpoint of this process that was removed early; later ones are in the events
        of their saves."""
        if not outcome.removed or self._has_warned_of_room:
            return
        self._has_warned_of_room = True
        text = (
            f"{self._directory}: the volume is full; {outcome.removed} was removed before a newer "
            "checkpoint existed, to make room for that. Enlarge the volume, or lower checkpoint.keep"
        )
        self._on_event(EventType.WARNING, {"message": text})
