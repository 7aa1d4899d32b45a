"""Starts a node's lasting workers, and replaces workers that ended, after a pause and a limited number of
times."""

import logging
import time
from collections.abc import Callable

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_trainer.node.reports import NoWorkers
from evergrad_trainer.node.worker_ends import HostTrouble, WorkerEnd
from evergrad_trainer.node.workers import Worker

_log = logging.getLogger(__name__)
RESTART_SECONDS = 1.0
"""Pause before a lost worker is started again: building its model meanwhile would slow down the workers that
are about to continue."""
_LONGEST_PAUSE = 10.0
_SIBLINGS_SECONDS = 120.0
"""Longest time that the first warm worker waits for the others at the start. Later starts may also take this
long at most, or 3 times the longest successful start. Without a limit, a hung start would be waited for
forever."""
_ALONE_SECONDS = 900.0
"""Longest time for a start if none has succeeded on this node, because its usual duration is not known
yet."""
_START_FACTOR = 3.0
"""A start may take this many times the longest one so far, if that is more than _SIBLINGS_SECONDS."""
_FAILED_STARTS = 3
"""Number of workers in a row that ended before they were warm, after which the node gives up."""


class WorkerStarts:
    """The running workers by local rank, and the workers that are due to start at a time of the monotonic
    clock."""

    def __init__(
        self,
        start: Callable[[int, int], Worker],
        *,
        num_workers: int,
    ) -> None:
        """``start(local_rank, serial)`` starts a process."""
        self._start_process = start
        self._num_workers = num_workers
        self.workers: dict[int, Worker] = {}
        self.are_over = False
        """If true, no more workers are started."""
        self.has_started = False
        """Whether the first start is over, because each worker was warm, or one has ended or hangs. From then
        on, the node's capacity is the number of its warm workers."""
        self._first_warm_at: float | None = None
        self._longest_start = 0.0
        """Duration of the longest successful start, in seconds."""
        self._serial = 0
        self._failed_starts = 0
        self._trouble = HostTrouble()
        self._due: list[tuple[float, int]] = []

    @property
    def warm(self) -> list[Worker]:
        """Return the workers that can take part in a group, sorted by local rank."""
        return sorted(
            (one for one in self.workers.values() if one.is_warm),
            key=lambda one: one.local_rank,
        )

    def start_all(self) -> None:
        for local_rank in range(self._num_workers):
            self._start(local_rank)

    def start_due(self, now: float) -> None:
        """Start the workers that are due."""
        due, self._due = (
            [one for one in self._due if one[0] <= now],
            [one for one in self._due if one[0] > now],
        )
        for _, local_rank in due:
            self._start(local_rank)

    def note_warm(self, worker: Worker) -> None:
        """Record that one more worker is warm."""
        # Do not count earlier failures, because a start has now succeeded on this host.
        self._failed_starts = 0
        self._longest_start = max(self._longest_start, time.monotonic() - worker.started_at)
        if self._first_warm_at is None:
            self._first_warm_at = time.monotonic()
        self.has_started |= all(one.is_warm for one in self.workers.values())

    def stop_waiting(self, now: float) -> bool:
        """Stop waiting for workers that hang at the start; return whether this call ended the wait."""
        if (
            self.has_started
            or self._first_warm_at is None
            or now - self._first_warm_at < _SIBLINGS_SECONDS
        ):
            return False
        self.has_started = True
        return True

    def kill_hung(self, now: float) -> None:
        """Kill workers whose start has made no progress for longer than allowed; they are replaced when they
        have ended.

        A worker that still reads weights makes progress: hundreds of gigabytes take long on any host, and
        killing the reader would start the read again from the beginning.
        """
        patience = (
            _ALONE_SECONDS
            if self._first_warm_at is None
            else max(_SIBLINGS_SECONDS, _START_FACTOR * self._longest_start)
        )
        for worker in self.workers.values():
            if worker.heartbeat.moved_bytes > worker.moved_bytes:
                worker.moved_bytes, worker.moved_at = worker.heartbeat.moved_bytes, now
            # Count from the first warm worker at the earliest, because only that shows how long a start
            # takes.
            waited = now - max(
                worker.started_at, worker.moved_at, self._first_warm_at or 0.0
            )
            if worker.state == "starting" and not worker.has_hung and waited > patience:
                _log.warning(
                    "worker %d (pid %d) hangs in its start and is replaced",
                    worker.local_rank,
                    worker.pid,
                )
                worker.has_hung = True
                worker.kill()

    def remove(self, worker: Worker) -> None:
        """Remove a worker whose process has ended."""
        if self.workers.get(worker.local_rank) is worker:
            del self.workers[worker.local_rank]

    def replace(
        self,
        worker: Worker,
        end: WorkerEnd,
        *,
        was_warm: bool,
    ) -> NoWorkers | None:
        """Plan a replacement after a pause. Returns None, or a report if this host has failed too often."""
        # A worker that was never warm says nothing about the run; a failure of a warm worker is counted by
        # the group.
        if not was_warm:
            if end.kind is ErrorKind.INPUT and self._first_warm_at is None:
                # The input was wrong at the first start: a retry would fail again, and no group exists that
                # would end.
                return NoWorkers(end.text, end.kind, ExitCode.USER_ERROR)
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                count = (
                    f"{self._failed_starts} workers in a row ended before they could train"
                )
                text = f"{count}; the last one: {end.text}"
                return NoWorkers(text, end.kind, trouble=end.trouble)
            pause: float | None = min(_LONGEST_PAUSE, 0.2 * 2.0**self._failed_starts)
        else:
            is_of_host = end.kind is ErrorKind.ENVIRONMENT
            pause = self._trouble.note(end.step) if is_of_host else RESTART_SECONDS
        if pause is None:
            text = f"workers failed again and again; the last one: {end.text}"
            return NoWorkers(text, end.kind, trouble=end.trouble)
        self._due.append((time.monotonic() + pause, worker.local_rank))
        return None

    def _start(self, local_rank: int) -> None:
        # A due worker may still be in the list when the run ends.
        if not self.are_over:
            self._serial += 1
            self.workers[local_rank] = self._start_process(local_rank, self._serial)
