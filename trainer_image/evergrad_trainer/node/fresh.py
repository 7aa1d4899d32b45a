"""Controls the workers of one node if each generation starts its own workers: scripts, and state that is
sharded over the ranks (level 2)."""

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_coordinator.protocol import Done, Finished, Go, Result, Up
from evergrad_trainer.node.reports import NoWorkers, Report, WorkersLeft, WorkersReady
from evergrad_trainer.node.stragglers import FINISH_SECONDS, Stragglers
from evergrad_trainer.node.worker_ends import (
    HostTrouble,
    Why,
    WorkerEnd,
    build_broken,
    describe_worker_end,
)
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.worker import channel

_HARD_SECONDS = 0.3
"""Seconds that a worker of a broken group has to end by itself; it has no state to save."""


@dataclass(frozen=True)
class Stops:
    """How workers stop in order.

    ``can_stop(generation)`` returns whether the workers of a generation save and leave when they receive
    SIGTERM. They have ``grace_seconds`` to do so.
    """

    can_stop: Callable[[int], bool]
    grace_seconds: float


class FreshWorkers:
    """Starts workers when a group begins, and ends them when the node leaves the group.

    ``start(local_rank, serial, variables)`` starts a process with these environment variables.
    """

    def __init__(
        self,
        start: Callable[[int, int, Mapping[str, str]], Worker],
        *,
        num_workers: int,
        report: Callable[[Report], None],
        stops: Stops,
        call_later: Callable[[float, Callable[[], None]], object] = lambda seconds, act: (
            None
        ),
        stragglers: Stragglers | None = None,
    ) -> None:
        """Prepare an empty group.

        ``call_later(seconds, act)`` calls ``act`` after a delay. Without it, deadlines are checked only at
        the next ``tick``.
        """
        self._start_process = start
        self._num_workers = num_workers
        self._tell = report
        self._can_stop, self._grace_seconds = stops.can_stop, stops.grace_seconds
        self._call_later = call_later
        self._workers: dict[int, Worker] = {}
        self._serial = 0
        self._go: Go | None = None
        self._generation = -1
        self._answered = -1
        self._ends: dict[int, WorkerEnd] = {}
        """Ends of the running group's workers, by local rank."""
        self._trouble = HostTrouble()
        self._stragglers = stragglers or Stragglers(limit_seconds=FINISH_SECONDS)
        self._expects_ends = False
        """Whether a worker of the running group has ended with 0, here or on another node."""
        self._ready_at = float("-inf")
        """Time before which this node is not ready for a group, so that it pauses after a failure."""
        self._is_stopping = False
        self._kill_at: float | None = None
        self._is_ending = False
        self._is_departing = False
        self._are_saved = True

    @property
    def capacity(self) -> int:
        """Number of workers that this node can start; 0 if the node is ending."""
        return 0 if self._is_ending else self._num_workers

    @property
    def place(self) -> Go | None:
        """The ``Go`` message of the running group, or None."""
        return self._go

    @property
    def is_empty(self) -> bool:
        return not self._workers

    def start(self) -> None:
        """Do nothing: workers start when a group begins."""

    def change(
        self,
        order: channel.WorkerPlan,
        *,
        cause: str,
        detail: str = "",
        is_only_holder: bool = False,
    ) -> None:
        """Leave the running group.

        If the group is intact and its workers can stop in order, they have ``grace_seconds``; otherwise they
        have 0.3 s. Workers that stop in order save by themselves, so ``order.saves`` is not used.
        """
        # Answer a repeated plan again, because the first answer may be lost.
        self._generation = max(order.generation, self._generation)
        self._answered = min(self._answered, order.generation - 1)
        if self._workers:
            in_order = (
                not order.hard
                and self._go is not None
                and self._can_stop(self._go.generation)
            )
            self._stop(
                self._grace_seconds if in_order else _HARD_SECONDS,
                is_asking=not self._is_stopping,
            )
        self._check_ready()

    def begin(self, go: Go) -> None:
        """Start this generation's workers with torchrun's variables."""
        self._go, self._ends, self._is_stopping, self._kill_at = go, {}, False, None
        self._expects_ends = False
        # Each generation has its own processes, so remains of an older generation cannot reach the new group.
        for local_rank in range(go.workers):
            self._serial += 1
            rank = go.first_rank + local_rank
            variables = {
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "WORLD_SIZE": str(go.world_size),
                "LOCAL_WORLD_SIZE": str(go.workers),
                "GROUP_RANK": str(go.node_rank),
                "GROUP_WORLD_SIZE": str(go.num_nodes),
                "ROLE_NAME": "default",
                "ROLE_RANK": str(rank),
                "ROLE_WORLD_SIZE": str(go.world_size),
                "MASTER_ADDR": go.address,
                "MASTER_PORT": str(go.port),
                "TORCHELASTIC_RUN_ID": str(go.generation),
                "TORCHELASTIC_RESTART_COUNT": "0",
                "TORCHELASTIC_MAX_RESTARTS": "0",
                # The node runs the store, so rank 0 must not try to open another store at the same port.
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            worker = self._start_process(local_rank, self._serial, variables)
            worker.state, worker.rank, worker.inside_generation = (
                "inside",
                rank,
                go.generation,
            )
            self._workers[local_rank] = worker
        self._tell(Up(go.generation, -1))

    def expect_ends(self, generation: int) -> None:
        """Expect the workers of ``generation`` to end, because a worker on another node ended with 0."""
        if self._go is not None and self._go.generation == generation:
            self._expects_ends = True

    def depart(self, generation: int | None, *, save: bool) -> None:
        """Leave the run. Workers that can save do so when they are requested to stop."""
        self._is_ending = self._is_departing = True
        if self._workers:
            self._stop(self._grace_seconds, is_asking=not self._is_stopping)
        self._check_gone()

    def finish(self, exit_code: int) -> None:
        """End all workers within 0.3 s, because the run is over."""
        self._is_ending = True
        if self._workers:
            self._stop(_HARD_SECONDS, is_asking=True)

    def kill(self) -> None:
        """Kill all workers."""
        self._is_ending = True
        for worker in self._workers.values():
            worker.kill()

    def hear(self, worker: Worker, record: channel.Record) -> None:
        """Process a record from a worker."""
        match record:
            case channel.Failed():
                worker.failure = record
            case channel.Observed():
                self._tell(record)
            case channel.WorkerResult():
                self._tell(record)

    def end(self, worker: Worker, exit_code: int) -> None:
        """Process the end of a worker's process, and report the outcome when all workers have ended."""
        if self._workers.get(worker.local_rank) is worker:
            del self._workers[worker.local_rank]
        worker.state = "ended"
        world_size = 1 if self._go is None else self._go.world_size
        end = describe_worker_end(
            worker, exit_code, was_asked=self._is_stopping, world_size=world_size
        )
        self._ends[worker.local_rank] = end

        if end.why is Why.DONE and self._go is not None:
            self._expects_ends = True
            if self._go.world_size > 1:
                self._tell(Finished(self._go.generation, worker.rank))

        # A requested end reports whether the state is saved. A failure or a lost lease breaks the group.
        if end.why is Why.ASKED:
            self._are_saved = self._are_saved and end.is_saved
        elif end.why in (Why.FAILED, Why.LEASE_LOST) and self._go is not None:
            self._tell(build_broken(worker, end, generation=self._go.generation))
            if end.kind is ErrorKind.ENVIRONMENT:
                pause = self._trouble.note(end.step)
                if pause is None:
                    text = f"workers failed again and again; the last one: {end.text}"
                    self._tell(NoWorkers(text, end.kind, trouble=end.trouble))
                    return
                # Try again on this host after the pause.
                self._ready_at = time.monotonic() + pause
                self._call_later(pause, self.tick)
            # The group of the other workers is broken, too.
            self._stop(_HARD_SECONDS, is_asking=True)
        if not self._workers:
            self._end_group()

    def _end_group(self) -> None:
        """Report the outcome of a group whose workers have all ended, and prepare for the next group."""
        go, ends = self._go, self._ends.values()
        self._is_stopping, self._kill_at = False, None
        self._check_gone()
        if self._is_ending or go is None:
            return
        # The node's report depends on all its workers: one failed worker outweighs the others.
        whys = {one.why for one in ends}
        if whys == {Why.DONE}:
            self._tell(Done(go.generation))
            return
        self._go = None
        if whys <= {Why.DONE, Why.RUN_STOP}:
            is_unsaved = any(one.exit_code == ExitCode.STOPPED_UNSAVED for one in ends)
            code = ExitCode.STOPPED_UNSAVED if is_unsaved else ExitCode.STOPPED_SAVED
            self._tell(Result(go.generation, 0, int(code), "stopped"))
        self._check_ready()

    def tick(self) -> None:
        """Kill workers whose deadline has passed, and report readiness if it is due; called periodically."""
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            for worker in self._workers.values():
                worker.kill()
        if self._expects_ends and not self._is_stopping:
            # The ends of hung workers then break the group, as any failure of a worker does.
            self._stragglers.end_hung(self._workers.values(), now=time.monotonic())
        self._check_ready()

    def _stop(self, seconds: float, *, is_asking: bool) -> None:
        # A later order never gives more time than an earlier one.
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        self._is_stopping = True
        # Do not wait for the next tick to check the deadline: the other nodes would wait 0.25 s longer.
        self._call_later(max(0.0, self._kill_at - time.monotonic()), self.tick)
        if is_asking:
            for worker in self._workers.values():
                worker.send_signal(signal.SIGTERM)

    def _check_ready(self) -> None:
        is_asked = self._generation > self._answered and not self._is_ending
        if not self._workers and is_asked and time.monotonic() >= self._ready_at:
            self._answered = self._generation
            self._go = None
            self._tell(WorkersReady(self._generation, self._num_workers, -1))

    def _check_gone(self) -> None:
        if self._is_departing and not self._workers:
            self._is_departing = False
            self._tell(WorkersLeft(self._are_saved))
