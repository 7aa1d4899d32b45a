"""When and what to save, what to do when that fails, what to load at a start: the policy over a store."""

import functools
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evergrad_coordinator.contract import ErrorKind
from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Checkpoint
from evergrad_trainer.checkpoint.dcp_storage import SnapshotPlanner
from evergrad_trainer.checkpoint.filesystem import filesystem_store
from evergrad_trainer.checkpoint.generations import check_fence, claim_exactly, claim_generation
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Identity
from evergrad_trainer.checkpoint.restoring import Restored, Search, load_newest
from evergrad_trainer.checkpoint.saving import (
    BackgroundSave,
    Outcome,
    Published,
    SaveOrder,
    ignore_solo_warning,
    run_save,
)
from evergrad_trainer.checkpoint.staging import HostStager, Snapshot, require_tensors
from evergrad_trainer.checkpoint.store import Store
from evergrad_trainer.errors import FencedError, PeerLostError, SaveError
from evergrad_trainer.records import EventType
from evergrad_trainer.world import Membership, World

__all__ = [
    "CheckpointManager",
    "Identity",
    "Published",
    "Restored",
    "check_fence",
    "claim_exactly",
    "claim_generation",
]

FENCE_SECONDS = 5.0
"""How often rank 0 looks between saves whether a newer process has claimed the directory."""

_JOIN_SECONDS = 0.02

_log = logging.getLogger(__name__)


@dataclass
class _Flight:
    """A save that has begun and is not yet reported."""

    background: BackgroundSave
    blocking_seconds: float
    best: bool


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
        store: Store | None = None,
    ) -> None:
        self._directory = directory
        self._membership = membership
        self._settings = settings
        self._identity = identity
        self._on_event = on_event
        self._store = store or filesystem_store(directory)
        self._stager = HostStager()
        self._flight: _Flight | None = None
        self._serial = 0
        self._failures = 0
        self._published: Published | None = None
        self._fenced: FencedError | None = None
        self._next_look = 0.0

    @property
    def published(self) -> Published | None:
        """The newest checkpoint that this process has saved and reported; the same on every rank."""
        return self._published

    def enter_world(self, *, failures: int, saves: int = 0) -> None:
        """Begin to save in ``membership.world``, which is new.

        ``failures``: in a row so far, as the ranks have agreed. ``saves``: how many this generation may have
        seen already.
        """
        self._serial = saves
        self._failures = failures

    def leave_world(self, *, patience_seconds: float = 0.0) -> None:
        """Give up a save that has not ended with its world. It is no failure: the next world saves again."""
        self.abandon(patience_seconds=patience_seconds)

    @property
    def is_saving(self) -> bool:
        """Whether a save is in flight."""
        return self._flight is not None and not self._flight.background.is_done

    @property
    def failures(self) -> int:
        """Saves that have failed in a row."""
        return self._failures

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
        require_tensors(state)
        copied: dict[str, Any] = json.loads(json.dumps(extra, allow_nan=False))
        self._land_flight()
        world = self._membership.world
        self._stop_if_fenced(world)
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
        )
        ignore_solo_warning()
        run = functools.partial(run_save, self._store, order, self._stage(state, world))
        is_background = self._settings.asynchronous and not wait
        background = BackgroundSave(run, name=f"checkpoint-{step}", yields=is_background)
        flight = self._flight = _Flight(background, time.monotonic() - started, best)
        if not is_background:
            self._join(flight)
            flight.blocking_seconds = time.monotonic() - started
            self.wait()
        return flight.blocking_seconds

    def mark_best(self, step: int) -> None:
        """Make the checkpoint of ``step``, saved already, the best one; waits for its save if that is under
        way.

        Every rank calls this; rank 0 writes. Trouble of the volume is told by an event: the checkpoint is no
        worse for it.
        """
        self._land_flight()
        if not self._membership.world.is_main:
            return
        library = self._store.library
        try:
            found = [
                candidate for candidate in library.scan() if candidate.version.step == step
            ]
            if found:
                library.mark_best(found[0].name, found[0].version)
        except OSError as error:
            self._on_event(
                EventType.WARNING,
                {"message": f"step {step} could not be marked as the best checkpoint: {error}"},
            )

    def poll(self) -> None:
        """Report a save that has ended since the last call. To be called each step; costs next to nothing.

        Raises SaveError after too many failures in a row. A newer claim on the directory is not raised here
        but told by ``is_fenced``, because ranks notice it at different steps.
        """
        if self._flight is not None and self._flight.background.is_done:
            self._land_flight()
        if self._membership.world.is_main and time.monotonic() >= self._next_look:
            self._look_at_fence()

    def wait(self) -> None:
        """Wait for a save under way and report it.

        Raises SaveError, or FencedError if that save met a newer claim.
        """
        outcome = self._land_flight()
        if outcome is not None and outcome.fenced is not None:
            raise outcome.fenced

    def restore(self, state: Mapping[str, torch.Tensor]) -> Restored | None:
        """Load the newest checkpoint that validates into ``state`` in place, all ranks together; None if
        there never was one.

        First removes what killed processes left behind. Damaged checkpoints go to ``quarantine/``, each with
        an event. Raises CheckpointError if there are checkpoints and none can be used, or if they are not
        this run's.
        """
        world = self._membership.world
        if world.is_main:
            try:
                self._store.attempts.clean(world.generation)
            except OSError as error:
                _log.warning(
                    "what an earlier process left behind could not be removed: %s", error
                )
        search = Search(
            self._store.library,
            checksums=self._settings.verify == "always",
            identity=self._identity,
            may_quarantine=True,
        )
        found = load_newest(search, state, world=world)
        if found is None:
            return None
        restored, rejected = found
        for passed in rejected:
            fields = {
                "checkpoint": passed.checkpoint,
                "reason": passed.reason,
                "quarantined_as": passed.quarantined_as,
            }
            self._on_event(EventType.FALLBACK, fields)
        self._on_event(
            EventType.RESTORED, {"checkpoint": restored.path.name, "seconds": restored.seconds}
        )
        return restored

    def is_fenced(self) -> bool:
        """Whether this rank knows that a newer process has claimed the directory; the loop folds it into its
        agreed flags."""
        return self._fenced is not None

    def fenced_error(self) -> FencedError:
        """The error to end with once all ranks have agreed that one of them is fenced."""
        why = f"this process is generation {self._membership.world.generation}"
        return self._fenced or FencedError(
            Problem(
                str(self._directory), "a newer process has claimed this run directory", why=why
            )
        )

    def close(self) -> None:
        """Wait for a save under way, report it and give the memory back. Raises as ``wait`` does."""
        try:
            self.wait()
        finally:
            self._stager.release()

    def abandon(self, *, patience_seconds: float = 5.0) -> None:
        """Leave in an exception's path: a save that ends within the patience is reported, one that hangs is
        left behind.

        Its thread may wait for a peer that is gone; it never keeps the process from ending.
        """
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.background.join(patience_seconds)
            if flight.background.is_done:
                self._report(flight)
            else:
                self._stager = HostStager()  # the thread may still read what the old one holds

    def _stage(self, state: Mapping[str, torch.Tensor], world: World) -> SnapshotPlanner:
        try:
            return SnapshotPlanner(
                self._stager.stage(state, rank=world.rank, world_size=world.size)
            )
        except (MemoryError, RuntimeError) as error:
            # The others are already on their way into the exchange; they learn of it there.
            return SnapshotPlanner(Snapshot({}, ""), failure=error)

    def _land_flight(self) -> Outcome | None:
        """Wait for the save under way, if any, and report it; how it ended."""
        flight = self._flight
        if flight is None:
            return None
        self._join(flight)
        self._flight = None
        outcome = self._report(flight)
        if self._failures >= self._settings.max_failures and outcome.fenced is None:
            text = (
                f"{self._directory}: {self._failures} saves in a row have failed; the last one: "
                f"{outcome.reason}"
            )
            raise SaveError(
                text, ErrorKind.ENVIRONMENT if outcome.is_of_host else ErrorKind.INTERNAL
            )
        return outcome

    def _join(self, flight: _Flight) -> None:
        """Wait for the end of a save.

        Raises PeerLostError when it cannot end because the world was given up.
        """
        interrupt = self._membership.world.interrupt
        if interrupt is None:
            flight.background.join()
        while not flight.background.is_done:
            if interrupt is not None and interrupt.is_overdue:
                raise PeerLostError("the group was given up during a save")
            flight.background.join(_JOIN_SECONDS)

    def _report(self, flight: _Flight) -> Outcome:
        outcome = flight.background.outcome
        published = outcome.published
        if published is not None:
            self._failures = 0
            self._published = published
            fields: dict[str, Any] = {
                "checkpoint": published.path.name,
                "seconds": published.seconds,
                "blocking_seconds": flight.blocking_seconds,
                "bytes": published.bytes,
                "kept": outcome.kept,
                "best": flight.best,
            }
            self._on_event(EventType.SAVE, fields)
            return outcome
        if not (outcome.is_peer_lost and self._membership.world.interrupt is not None):
            # Else the world ends now, and the next one saves again.
            self._failures += 1
        self._fenced = self._fenced or outcome.fenced
        fields = {
            "reason": outcome.reason,
            "trouble": outcome.trouble,
            "failures": self._failures,
            "blocking_seconds": flight.blocking_seconds,
        }
        self._on_event(EventType.SAVE_FAILED, fields)
        return outcome

    def _stop_if_fenced(self, world: World) -> None:
        if not world.all_agree(self._fenced is None):
            raise self.fenced_error()

    def _look_at_fence(self) -> None:
        self._next_look = time.monotonic() + FENCE_SECONDS
        try:
            self._store.fence.check(self._membership.world.generation)
        except FencedError as error:
            self._fenced = error
        except OSError as error:
            # A save would fail too, and say so; training itself needs nothing from the volume.
            _log.warning("%s: cannot be read: %s", self._directory, error)
