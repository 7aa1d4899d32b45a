"""The workers of one node where each generation has its own: scripts, and state that no single rank holds whole (level 2)."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.protocol import Broken as BrokenGroup
from evergrad_coordinator.protocol import Cause, Done, Go, Result
from evergrad_trainer.elastic import channel as say
from evergrad_trainer.elastic.lost_peers import is_lost_peer
from evergrad_trainer.node.crew import Listener
from evergrad_trainer.node.failures import describe_end
from evergrad_trainer.node.workers import Worker

_HARD_SECONDS = 0.3
"""A worker of a group that is gone has nothing to save: so long it may take to end by itself."""
_CLEAN = (ExitCode.DONE, ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED)


class FreshListener(Listener, Protocol):
    """What a crew of fresh workers reports besides."""

    def done(self, message: Done) -> None:
        """All workers of this node have ended well."""

    def stopped(self, message: Result) -> None:
        """All workers have ended because the run itself asked for it (a stop file, a step count)."""


class FreshCrew:
    """Starts workers when a group begins and ends them when it is left. ``start(local_rank, serial, variables)``."""

    def __init__(
        self,
        start: Callable[[int, int, Mapping[str, str]], Worker],
        *,
        num_workers: int,
        listener: FreshListener,
        can_stop: Callable[[int], bool],
        grace_seconds: float,
    ) -> None:
        """``can_stop(generation)``: whether its workers save and leave when they are asked to; they get ``grace_seconds``."""
        self._start_process = start
        self._num_workers = num_workers
        self._listener = listener
        self._can_stop = can_stop
        self._grace_seconds = grace_seconds
        self._workers: dict[int, Worker] = {}
        self._serial = 0
        self._go: Go | None = None
        self._generation = -1
        self._answered = -1
        self._codes: dict[int, int] = {}
        self._is_stopping = False
        self._kill_at: float | None = None
        self._is_ending = False
        self._is_departing = False
        self._are_saved = True

    @property
    def capacity(self) -> int:
        """Workers this node would start; it is warm as soon as it runs."""
        return 0 if self._is_ending else self._num_workers

    @property
    def place(self) -> Go | None:
        """The running group's message to this node."""
        return self._go

    @property
    def is_empty(self) -> bool:
        return not self._workers

    @property
    def workers(self) -> Sequence[Worker]:
        return tuple(self._workers.values())

    def start(self) -> None:
        """Nothing to start before a group begins."""

    def change(
        self, generation: int, *, hard: bool, cause: str, is_only_holder: bool = False, patience_seconds: float = 0.0
    ) -> None:
        """Leave the running group: in order if it is whole and its workers know how, at once otherwise."""
        self._generation = max(generation, self._generation)
        self._answered = min(self._answered, generation - 1)
        if self._workers:
            in_order = not hard and self._go is not None and self._can_stop(self._go.generation)
            self._stop(self._grace_seconds if in_order else _HARD_SECONDS, is_asking=not self._is_stopping)
        self._check_ready()

    def begin(self, go: Go) -> None:
        """Start this generation's workers with torchrun's variables."""
        self._go, self._codes, self._is_stopping, self._kill_at = go, {}, False, None
        for local_rank in range(go.workers):
            self._serial += 1
            worker = self._start_process(local_rank, self._serial, _variables(go, local_rank))
            worker.state, worker.rank, worker.inside_generation = "inside", go.first_rank + local_rank, go.generation
            self._workers[local_rank] = worker
        self._listener.up(go.generation, -1)

    def depart(self, generation: int | None, *, save: bool) -> None:
        """Leave the run. Workers saved when they were asked to stop, or could not."""
        self._is_ending = self._is_departing = True
        if self._workers:
            self._stop(self._grace_seconds, is_asking=not self._is_stopping)
        self._check_gone()

    def finish(self, exit_code: int) -> None:
        """The run is over."""
        self._is_ending = True
        if self._workers:
            self._stop(_HARD_SECONDS, is_asking=True)

    def kill(self) -> None:
        """End all workers now."""
        self._is_ending = True
        for worker in self._workers.values():
            worker.kill()

    def hear(self, worker: Worker, record: say.Record) -> None:
        """A record from a worker."""
        match record:
            case say.Failed():
                worker.failure = record
            case say.Observed():
                self._listener.observed(record)
            case say.Ended():
                self._listener.ended(record)

    def end(self, worker: Worker, exit_code: int) -> None:
        """A worker's process has ended."""
        if self._workers.get(worker.local_rank) is worker:
            del self._workers[worker.local_rank]
        worker.state = "ended"
        self._codes[worker.local_rank] = exit_code
        if self._is_stopping:
            self._are_saved = self._are_saved and exit_code in (ExitCode.DONE, ExitCode.STOPPED_SAVED)
        elif exit_code not in _CLEAN and self._go is not None:
            self._listener.broken(self._describe(worker, exit_code, self._go))
            # Its siblings' group is gone too.
            self._stop(_HARD_SECONDS, is_asking=True)
        if not self._workers:
            self._all_ended()

    def tick(self) -> None:
        """Now and then: end workers that have had their time."""
        if self._kill_at is not None and time.monotonic() > self._kill_at:
            for worker in self._workers.values():
                worker.kill()

    def _stop(self, seconds: float, *, is_asking: bool) -> None:
        deadline = time.monotonic() + seconds
        self._kill_at = deadline if self._kill_at is None else min(self._kill_at, deadline)
        self._is_stopping = True
        if is_asking:
            for worker in self._workers.values():
                worker.send_signal(signal.SIGTERM)

    def _all_ended(self) -> None:
        go, codes = self._go, set(self._codes.values())
        was_asked, self._is_stopping, self._kill_at = self._is_stopping, False, None
        self._check_gone()
        if self._is_ending or go is None:
            return
        if not was_asked and codes == {int(ExitCode.DONE)}:
            self._listener.done(Done(go.generation))
            return
        self._go = None
        if not was_asked and codes <= {int(code) for code in _CLEAN}:
            worst = ExitCode.STOPPED_UNSAVED if int(ExitCode.STOPPED_UNSAVED) in codes else ExitCode.STOPPED_SAVED
            self._listener.stopped(Result(go.generation, 0, int(worst), "stopped"))
        self._check_ready()

    def _check_ready(self) -> None:
        if not self._workers and self._generation > self._answered and not self._is_ending:
            self._answered = self._generation
            self._go = None
            self._listener.ready(self._generation, workers=self._num_workers, step=-1)

    def _check_gone(self) -> None:
        if self._is_departing and not self._workers:
            self._is_departing = False
            self._listener.departed(is_saved=self._are_saved)

    def _describe(self, worker: Worker, exit_code: int, go: Go) -> BrokenGroup:
        failure, oom = worker.failure, worker.was_oom_killed()
        text = f"{failure.error}: {failure.text}" if failure else describe_end(exit_code, was_oom=oom)
        cause: Cause = "out_of_memory" if oom else "worker_crash" if failure is None else "user_error"
        if failure is None and worker.last_lines is not None and exit_code > 0:
            text = f"{text}; it said: {worker.last_lines()}"
        if is_lost_peer(text, world_size=go.world_size):
            cause = "peer_lost"
        return BrokenGroup(
            go.generation,
            cause,
            rank=worker.rank,
            step=-1 if failure is None else failure.step,
            exit_code=exit_code,
            message=text[: say.MAX_TEXT],
            is_final=(failure is not None and failure.is_final) or exit_code == ExitCode.USER_ERROR,
        )


def _variables(go: Go, local_rank: int) -> dict[str, str]:
    """torchrun's variables for one worker."""
    rank = go.first_rank + local_rank
    return {
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
        # The store is the node's: rank 0 must not try to open another one at its port.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
