"""Decides when to save, how to handle failed saves, and which checkpoint to load at a start."""

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
"""Interval at which a wait for a save checks whether the world was given up."""

_log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A save that was started and is not reported yet."""

    background: BackgroundSave
    blocking_seconds: float
    best: bool

    def join(self, world: World) -> None:
        """Wait until the save has ended. Raises PeerLostError if the world is given up meanwhile."""
        if world.interrupt is None:
            self.background.join()
            return
        # Wait in short intervals: the thread may block on a lost peer until the group's timeout, which is far
        # longer than the other processes wait for this one.
        while not self.background.is_done:
            if world.interrupt.is_overdue:
                raise PeerLostError("the group was given up during a save")
            self.background.join(_JOIN_SECONDS)


class CheckpointManager:
    """Saves and restores the checkpoints of one run, on one rank.

    Use the manager only from the main thread. Every rank must make the same calls in the same order.
    ``membership.world`` is read at each call and is not kept for longer than one save.
    ``on_event(type, fields)`` is called in the main thread, never in the background thread of a save.
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
        """Newest checkpoint that this process has saved since its last restore; equal on every rank."""
        self.failures = 0
        """Number of consecutive failed saves."""
        self.anchors: frozenset[int] = frozenset()
        """Steps whose checkpoints retention keeps, however old they are."""
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
        """Prepare for saves in ``membership.world``, which is new.

        ``failures`` is the number of consecutive failed saves so far, which the ranks have agreed on.
        ``saves`` is the largest number of saves that this generation may already have started.
        """
        self._serial = saves
        self.failures = failures

    @property
    def is_saving(self) -> bool:
        """Whether a save is in progress."""
        return self._flight is not None and not self._flight.background.is_done

    def is_fenced(self) -> bool:
        """Return whether this rank has seen a newer claim of the directory.

        The loop shares the result with all ranks in its agreed flags.
        """
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
        """Save ``state`` and ``extra`` (JSON values), and return the seconds that training was blocked.

        First waits for any earlier save that is still in progress. With ``wait``, or if saving is not
        asynchronous, returns when the checkpoint is published or the save has failed (see ``published``).
        A failed save is reported as an event. Raises SaveError after several consecutive failures. Raises
        FencedError on all ranks if a newer process has claimed the directory. Raises TypeError or ValueError
        if ``state`` or ``extra`` cannot be stored.
        """
        started = time.monotonic()
        # Raise the caller's mistakes before this rank waits or communicates.
        require_tensors(state)
        copied: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))

        # There is only one host buffer and one group for saves, so the previous save must have ended.
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
        """Mark the checkpoint of ``step``, which was saved before, as the best one.

        Waits for its save if that is still in progress. Every rank calls this, and rank 0 writes the pointer
        unless it already names a checkpoint of ``step``. If the volume fails, a warning event is reported,
        because the checkpoint itself is still valid.
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
        """Report a save that has ended since the last call. Call this after each step; it is cheap.

        Raises SaveError after too many consecutive failures. A newer claim of the directory does not raise an
        error here, because ranks detect it at different steps. Use ``is_fenced`` instead.
        """
        if self._flight is not None and self._flight.background.is_done:
            self.land()
        # Only rank 0 reads the volume, because a thousand ranks would overload it. The loop's flags share the
        # result.
        if self._membership.world.is_main:
            self._fence.look()

    def wait(self) -> None:
        """Wait for a save in progress, if any, and report it.

        Raises SaveError after too many consecutive failures, and FencedError if the save found a newer claim.
        """
        outcome = self.land()
        if outcome is not None and outcome.fenced is not None:
            raise outcome.fenced

    def restore(
        self, state: Mapping[str, torch.Tensor], *, ahead: HeldFiles | None = None
    ) -> Restored | None:
        """Load the newest valid checkpoint into ``state`` in place. All ranks call this.

        Returns None if there are no checkpoints. ``ahead`` contains the files of the newest checkpoint if
        this process has already started to read them. First removes files that killed processes have left.
        Damaged checkpoints are moved to ``quarantine/`` and reported as events. Raises CheckpointError if
        none of the checkpoints can be used or if they belong to another run.
        """
        world = self._membership.world
        self.published = None  # it may be damaged and quarantined by now
        if world.is_main:
            try:
                self._store.attempts.clean(world.generation)
            except OSError as error:
                # This is only a warning, because such files need space but are otherwise harmless.
                _log.warning("files of an earlier process could not be removed: %s", error)
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
        """Record that the events of this world's start are written. Every rank calls this after a step.

        Rank 0 also reports checkpoints that an earlier process has quarantined if that process was killed
        before it wrote the event.
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
            # This is only a warning. The next start reports the fallbacks again, which is harmless.
            _log.warning("%s: %s", self._directory, error)

    def _report_fallback(self, passed: Mapping[str, Any]) -> None:
        self._fallbacks.append(dict(passed))
        fields = {key: value for key, value in passed.items() if key != "step"}
        self._on_event(EventType.FALLBACK, fields)

    def close(self) -> None:
        """Wait for a save in progress, report it and release the memory. Raises what ``wait`` raises."""
        try:
            self.wait()
        finally:
            self._stager.release()

    def abandon(self, *, patience_seconds: float = 5.0) -> None:
        """Abandon a save whose world has ended, or whose process is handling an exception.

        A save that ends within ``patience_seconds`` is reported. A save that hangs is left running and does
        not count as a failure, because the next world saves again. Its thread may wait for a lost peer, but
        it never prevents the process from exiting.
        """
        # Clear the save first, so that a later call does not wait for it again if this method raises.
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.background.join(patience_seconds)
            if flight.background.is_done:
                self._report(flight)
            else:
                # The thread may still read the memory of the old stager.
                self._stager = HostStager()

    def land(self) -> SaveResult | None:
        """Wait for the save in progress, if any, report it and return its result.

        Raises SaveError after too many consecutive failures. A newer claim does not raise an error here,
        because ranks may detect the end of the save at different steps.
        """
        flight = self._flight
        if flight is None:
            return None
        flight.join(self._membership.world)
        self._flight = None
        outcome = self._report(flight)
        # A fenced save is not a failure of the volume. ``wait`` raises the FencedError.
        if self.failures >= self._settings.max_failures and outcome.fenced is None:
            kind = ErrorKind.ENVIRONMENT if outcome.is_of_host else ErrorKind.INTERNAL
            raise SaveError(self._describe_failed_saves(outcome), kind, outcome.trouble)
        return outcome

    def _describe_failed_saves(self, outcome: SaveResult) -> str:
        """Return a message with the failure, the checkpoint that a restart would load, and a remedy."""
        times = "save has" if self.failures == 1 else "saves in a row have"
        text = f"{self._directory}: {self.failures} {times} failed; the last one: {outcome.reason}."
        # Only rank 0 reads the volume, because it reports the error for all ranks.
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
        """Count a save that has ended, and report it as an event."""
        outcome = flight.background.outcome
        # A second attempt has used the next serial.
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

        # A lost peer ends this world and the next world saves again, so this does not count as a failure.
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
        """Warn once per process that a checkpoint was removed early. Save events report later removals."""
        if not outcome.removed or self._has_warned_of_room:
            return
        self._has_warned_of_room = True
        text = (
            f"{self._directory}: the volume is full; {outcome.removed} was removed before a newer "
            "checkpoint existed, to make room for it. Enlarge the volume, or lower checkpoint.keep"
        )
        self._on_event(EventType.WARNING, {"message": text})
