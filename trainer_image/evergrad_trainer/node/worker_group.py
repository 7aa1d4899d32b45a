"""Controls, counts and replaces the workers of one node that outlive their worlds.

No decision about the group is made here. The supervisor passes on the coordinator's messages, and the worker
group returns reports, which are values of ``node.reports``.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from evergrad_common.causes import BreakCause
from evergrad_common.contract import ErrorKind
from evergrad_coordinator.protocol import Broken, Capacity, Go, Restoring, Up
from evergrad_trainer.node.patience import WorkerTimeouts
from evergrad_trainer.node.reports import Report, WorkersLeft, WorkersReady
from evergrad_trainer.node.worker_ends import build_broken, describe_lasting_end
from evergrad_trainer.node.worker_starts import WorkerStarts
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.worker import channel

_log = logging.getLogger(__name__)


class WorkerGroup(Protocol):
    """The interface through which a supervisor controls the workers of its node."""

    @property
    def capacity(self) -> int: ...
    @property
    def place(self) -> Go | None: ...
    @property
    def is_empty(self) -> bool: ...
    def start(self) -> None: ...
    def change(
        self,
        order: channel.WorkerPlan,
        *,
        cause: str,
        detail: str = "",
        is_only_holder: bool = False,
    ) -> None: ...
    def begin(self, go: Go) -> None: ...
    def expect_ends(self, generation: int) -> None: ...
    def depart(self, generation: int | None, *, save: bool) -> None: ...
    def finish(self, exit_code: int) -> None: ...
    def kill(self) -> None: ...
    def hear(self, worker: Worker, record: channel.Record) -> None: ...
    def end(self, worker: Worker, exit_code: int) -> None: ...
    def tick(self) -> None: ...


@dataclass(frozen=True)
class WorkerBounds:
    """Time limits of a group.

    ``setup_seconds`` is the time in which all members, once ready, must connect to each other.
    ``timeout_seconds`` is the timeout of the group's collectives.
    """

    setup_seconds: float
    timeout_seconds: float


class Entry:
    """The workers that are entering a group, and the state transferred to them so far."""

    def __init__(self, go: Go, workers: Sequence[Worker]) -> None:
        self.go = go
        self._workers = workers
        self._moved = sum(one.heartbeat.moved_bytes for one in workers)
        """Bytes of state that the workers have reported, including the bytes of earlier groups."""
        self._is_up = False

    def find_up(self, record: channel.WorkerUp) -> Up | None:
        """Return the ``Up`` message when the last worker has entered the group, and None otherwise."""
        generation = self.go.generation
        if self._is_up or any(one.up_generation < generation for one in self._workers):
            return None
        self._is_up = True
        return Up(generation, record.step)

    def find_growth(self) -> Restoring | None:
        """Return the bytes of state that have reached the workers, or None.

        The result is None if the number has not grown since the last call, or if all workers have entered.
        """
        moved = sum(one.heartbeat.moved_bytes for one in self._workers)
        if self._is_up or moved <= self._moved:
            return None
        self._moved = moved
        return Restoring(self.go.generation, moved)


class Farewell:
    """The workers that are leaving the run; at most one of them saves the state."""

    def __init__(
        self, holders: Sequence[Worker], generation: int | None, *, save: bool
    ) -> None:
        """Order ``holders`` to leave; with ``save``, the worker with the newest step saves first."""
        number = channel.LOCAL_GENERATION if generation is None else generation
        newest = min(holders, key=lambda one: (-one.step, one.local_rank), default=None)
        self._saver = newest if save else None
        self.is_saved = self._saver is None
        """Whether the state is saved, as the worker that saves it reports; True if no save was requested."""
        for worker in holders:
            order = channel.WorkerLeave(
                number, save=worker is self._saver, is_planned=generation is not None
            )
            worker.channel.send(order, wait=False)

    def note_left(self, worker: Worker, record: channel.WorkerLeft) -> None:
        """Record a worker's report that it is about to end."""
        if worker is self._saver:
            self.is_saved = record.is_saved


def pass_on_broken(worker: Worker, record: channel.WorkerBroken) -> Broken:
    """Return the coordinator's message for a worker's report that its group has broken."""
    is_numeric = record.kind == ErrorKind.NUMERIC
    cause: BreakCause = "numeric" if is_numeric else "peer_lost"
    return Broken(record.generation, cause, worker.rank, record.step, message=record.text)


class InProcessWorkers:
    """Level 1: a worker's process runs as long as the node, and takes part in one group after another."""

    def __init__(
        self,
        start: Callable[[int, int], Worker],
        *,
        num_workers: int,
        report: Callable[[Report], None],
        describe_place: Callable[[int, int], str],
        bounds: WorkerBounds,
    ) -> None:
        """Prepare the workers without starting them.

        ``start(local_rank, serial)`` starts a process, and ``describe_place(step, slot)`` names the samples
        of a slot.
        """
        self._starts = WorkerStarts(start, num_workers=num_workers)
        self._tell = report
        self._describe_place = describe_place
        self._setup_seconds = bounds.setup_seconds
        self._patience = WorkerTimeouts(timeout_seconds=bounds.timeout_seconds)
        self._change = channel.WorkerPlan(-1, hard=False)
        self._cause, self._detail = "other", ""
        self._is_only_holder = False
        self._answered = -1
        self._inside: Go | None = None
        self._entry: Entry | None = None
        self._farewell: Farewell | None = None

    # ---- calls from the supervisor -------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Number of workers that can take part in a group.

        It is 0 until all workers have started, or until the wait for a worker that failed to start or hangs
        has ended. If a node reported its first warm worker, a group would begin that the second worker would
        change again.
        """
        return len(self._starts.warm) if self._starts.has_started else 0

    @property
    def place(self) -> Go | None:
        """The ``Go`` message of the running group, or None unless all its workers here are in the group."""
        return self._inside

    def start(self) -> None:
        """Start all workers."""
        self._starts.start_all()

    def change(
        self,
        order: channel.WorkerPlan,
        *,
        cause: str,
        detail: str = "",
        is_only_holder: bool = False,
    ) -> None:
        """Request all workers to leave the running group.

        ``is_only_holder``: whether no other node holds a state.
        """
        if order.generation < self._change.generation:
            return
        self._change, self._is_only_holder = order, is_only_holder
        self._cause, self._detail = cause, detail
        self._patience.asked_at = time.monotonic()
        # Answer a repeated plan again: the first answer may be lost, or the coordinator that received it.
        self._answered = min(self._answered, order.generation - 1)
        for worker in self._starts.warm:
            worker.channel.send(self._change, wait=False)
        self._check_ready()

    def begin(self, go: Go) -> None:
        """Assign ranks to the workers and order them to begin, because all nodes are ready."""
        # Only a worker that has answered the newest plan has certainly left every older group.
        chosen = [
            one for one in self._starts.warm if one.ready_generation == go.generation
        ][: go.workers]
        if len(chosen) < go.workers:
            message = "a worker was lost before the group began"
            self._tell(Broken(go.generation, "setup_failed", message=message))
            return
        self._inside, self._entry = go, Entry(go, chosen)
        for rank, worker in enumerate(chosen, start=go.first_rank):
            worker.state, worker.inside_generation, worker.rank = (
                "inside",
                go.generation,
                rank,
            )
            group = (go.generation, rank, go.world_size, go.address, go.port)
            worker.channel.send(
                channel.WorkerGo(
                    *group, self._setup_seconds, cause=self._cause, detail=self._detail
                ),
                wait=False,
            )

    def expect_ends(self, generation: int) -> None:
        """Do nothing: these workers outlive their groups, and end together when their loops agree to."""

    def depart(self, generation: int | None, *, save: bool) -> None:
        """Order all workers to leave; with ``save``, the worker with the newest state saves it first.

        ``generation`` is None if no coordinator has planned the departure.
        """
        self._starts.are_over = True
        self._farewell = Farewell(self._starts.warm, generation, save=save)
        # Kill workers that are still starting: they hold no state, and the departure would wait for them.
        for worker in self._starts.workers.values():
            if not worker.is_warm:
                worker.kill()
        self._check_gone()

    def finish(self, exit_code: int) -> None:
        """Order all workers to end with ``exit_code``, because the run is over."""
        self._starts.are_over = True
        for worker in self._starts.workers.values():
            worker.channel.send(channel.WorkerFinish(exit_code), wait=False)
            if not worker.is_warm:
                worker.kill()

    def kill(self) -> None:
        """Kill all workers."""
        self._starts.are_over = True
        for worker in self._starts.workers.values():
            worker.kill()

    @property
    def is_empty(self) -> bool:
        return not self._starts.workers

    # ---- records and ends of workers -----------------------------------------------------------------------

    def hear(self, worker: Worker, record: channel.Record) -> None:
        """Process a record from a worker."""
        worker.last_heard = time.monotonic()
        match record:
            case channel.Warm():
                worker.state = "idle"
                self._starts.note_warm(worker)
                if self._starts.has_started:
                    self._tell(Capacity(self.capacity))
                if self._change.generation > self._answered:
                    worker.channel.send(self._change, wait=False)
            case channel.WorkerReady():
                worker.state = "idle"
                worker.ready_generation, worker.step = record.generation, record.step
                if self._inside is not None and self._inside.generation < record.generation:
                    self._inside = None
                self._check_ready()
            case channel.WorkerUp():
                worker.step = record.step
                worker.up_generation = record.generation
                if self._entry is not None and self._entry.go is self._inside:
                    self._tell_of(self._entry.find_up(record))
            case channel.WorkerBroken():
                worker.step, worker.state = record.step, "idle"
                # This node is in no group from now on, and reports so to a coordinator that has restarted.
                if (
                    self._inside is not None
                    and self._inside.generation == record.generation
                ):
                    self._inside = None
                self._tell(pass_on_broken(worker, record))
            case channel.Failed():
                worker.failure, worker.step = record, record.step
            case channel.WorkerResult():
                self._tell(record)
            case channel.Observed():
                self._tell(record)
            case channel.WorkerLeft():
                if self._farewell is not None:
                    self._farewell.note_left(worker, record)

    def end(self, worker: Worker, exit_code: int) -> None:
        """Process the end of a worker's process: report it, and replace the worker if possible."""
        self._starts.remove(worker)
        if self._starts.are_over:
            self._check_gone()
            return

        # The first end stops the wait for the other workers to start: the node joins with its warm workers.
        was_warm, was_inside = worker.is_warm, worker.state == "inside"
        worker.state = "ended"
        if not self._starts.has_started:
            self._starts.has_started = True
            if self.capacity:
                self._tell(Capacity(self.capacity))
        if (
            was_inside
            and self._inside is not None
            and worker.inside_generation == self._inside.generation
        ):
            self._inside = None

        # Report the break before the capacity: the plan for the new capacity then contains the cause.
        end = describe_lasting_end(worker, exit_code, describe_place=self._describe_place)
        if was_inside or end.is_final:
            self._tell(
                build_broken(worker, end, generation=max(worker.inside_generation, 0))
            )
        if was_warm:
            self._tell(Capacity(self.capacity))
            self._check_ready()

        why_not = self._starts.replace(worker, end, was_warm=was_warm)
        if why_not is not None:
            self._tell(why_not)

    def tick(self) -> None:
        """Start workers that are due, and kill workers that are frozen or stuck; called periodically."""
        now = time.monotonic()
        self._starts.start_due(now)
        if self._starts.stop_waiting(now):
            text = "only %d workers have started so far: the node joins with them"
            _log.warning(text, self.capacity)
            self._tell(Capacity(self.capacity))
        if self._entry is not None and self._entry.go is self._inside:
            self._tell_of(self._entry.find_growth())
        self._patience.check_clock(now, self._starts.workers.values())
        self._starts.kill_hung(now)
        for worker in self._starts.warm:
            worker.channel.send(channel.WorkerPing(), wait=False)
            is_asked = (
                self._change.hard and worker.ready_generation < self._change.generation
            )
            why = self._patience.why_kill(
                worker, now, is_asked=is_asked, is_only_holder=self._is_only_holder
            )
            if why is not None:
                text = "worker %d (pid %d) %s and is replaced"
                _log.warning(text, worker.local_rank, worker.pid, why)
                worker.kill()

    def _check_ready(self) -> None:
        generation = self._change.generation
        warm = self._starts.warm
        if generation <= self._answered or any(
            worker.ready_generation < generation for worker in warm
        ):
            return
        self._answered = generation
        # Report even without a warm worker: the other nodes wait for this node to leave the old group.
        step = max((worker.step for worker in warm), default=-1)
        # Report the capacity, not the number of warm workers: it is 0 while the node waits for a worker.
        self._tell(WorkersReady(generation, self.capacity, step))

    def _tell_of(self, report: Report | None) -> None:
        if report is not None:
            self._tell(report)

    def _check_gone(self) -> None:
        if self._farewell is not None and not self._starts.workers:
            self._tell(WorkersLeft(self._farewell.is_saved))
