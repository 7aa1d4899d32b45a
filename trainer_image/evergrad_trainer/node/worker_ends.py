"""Decides why a worker ended. The decision is made only here, and other modules read the result.

==========  ========================================================  ======================================
why         condition                                                 consequence
==========  ========================================================  ======================================
asked       any code, after the node requested the worker to stop     none here; the requester continues
lease_lost  code ``LEASE_LOST``, used by ``evergrad.elastic``         the group has lost only this member
done        0                                                         the worker has completed its part
run_stop    75 or 76                                                  the run itself stopped, so it ends
failed      any other code, or a signal                               the group is broken, with a cause
==========  ========================================================  ======================================
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from evergrad.node_state import LEASE_LOST
from evergrad_common.causes import BreakCause
from evergrad_common.contract import UNDISTURBED_SECONDS, ErrorKind, ExitCode
from evergrad_coordinator.protocol import Broken
from evergrad_trainer.node.failures import describe_end
from evergrad_trainer.node.workers import Worker
from evergrad_trainer.worker.channel import Failed, fit_text
from evergrad_trainer.worker.peer_failures import is_peer_failure

_SAVED = (ExitCode.DONE, ExitCode.STOPPED_SAVED)
_RETRIES = 3
"""Failures of this host in a row, without progress, after which the run must continue on another host."""


class Why(StrEnum):
    """Why a worker's process has ended."""

    DONE = "done"
    FAILED = "failed"
    ASKED = "asked"
    LEASE_LOST = "lease_lost"
    RUN_STOP = "run_stop"


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended.

    ``cause``, ``kind``, ``text`` and ``is_final`` describe the problem, if there was one.
    """

    why: Why
    exit_code: int
    cause: BreakCause = "worker_crash"
    kind: ErrorKind = ErrorKind.INTERNAL
    text: str = ""
    step: int = -1
    """Newest finished step that the worker has reported; -1 if unknown."""
    is_final: bool = False
    trouble: str = ""
    """One of causes.TROUBLES if a volume failed, and empty otherwise."""

    @property
    def is_saved(self) -> bool:
        """Whether the worker's state was saved, or it had none to save."""
        return self.exit_code in _SAVED


def decide_why(exit_code: int, *, was_asked: bool) -> Why:
    """Return why a fresh worker ended. ``was_asked``: its node had requested it to stop."""
    if was_asked:
        return Why.ASKED
    if exit_code == LEASE_LOST:
        return Why.LEASE_LOST
    if exit_code == ExitCode.DONE:
        return Why.DONE
    return (
        Why.RUN_STOP
        if exit_code in (ExitCode.STOPPED_SAVED, ExitCode.STOPPED_UNSAVED)
        else Why.FAILED
    )


def describe_lasting_end(
    worker: Worker, exit_code: int, *, describe_place: Callable[[int, int], str]
) -> WorkerEnd:
    """Describe the unrequested end of a worker that outlives its groups.

    ``describe_place(step, slot)`` names the samples of a slot. It is used if the worker reported no error
    itself.
    """
    step, slot = worker.heartbeat.step, worker.heartbeat.slot
    if worker.failure is not None:
        end = _describe_failure(worker.failure, exit_code)
    elif worker.has_hung:
        # The same start may succeed on another host, or here later: a mount or device did not respond.
        kind, text = ErrorKind.ENVIRONMENT, "hung in its start"
        end = WorkerEnd(Why.FAILED, exit_code, "environment", kind, text)
    else:
        samples = f"; its samples are {describe_place(step, slot)}" if step >= 0 else ""
        place = f" in step {step}, slot {slot}{samples}" if step >= 0 else ""
        end = _describe_silent(worker, exit_code, world_size=1, place=place)
    return replace(end, step=step)


def describe_worker_end(
    worker: Worker, exit_code: int, *, was_asked: bool, world_size: int
) -> WorkerEnd:
    """Describe the end of a worker that lives for one group of ``world_size`` ranks."""
    why = decide_why(exit_code, was_asked=was_asked)
    if why is Why.LEASE_LOST:
        text = "the node had no contact with the coordinator for longer than its lease"
        return WorkerEnd(why, exit_code, "peer_lost", ErrorKind.PEER, text)
    if why is not Why.FAILED:
        return WorkerEnd(why, exit_code)
    if worker.failure is not None:
        return _describe_failure(worker.failure, exit_code)
    end = _describe_silent(worker, exit_code, world_size=world_size)
    # A script uses this exit code to report that its input is wrong.
    return replace(end, is_final=exit_code == ExitCode.USER_ERROR)


def _describe_silent(
    worker: Worker, exit_code: int, *, world_size: int, place: str = ""
) -> WorkerEnd:
    """Describe the end of a worker that failed without reporting an error."""
    oom = worker.was_oom_killed()
    text = worker.why_killed or describe_end(exit_code, was_oom=oom) + place
    if worker.last_lines is not None and exit_code > 0:
        text = f"{text}; it said: {worker.last_lines()}"
    cause: BreakCause = (
        "out_of_memory" if oom else "stuck" if worker.was_killed else "worker_crash"
    )
    if is_peer_failure(text, world_size=world_size):
        cause = "peer_lost"
    kind = ErrorKind.PEER if cause == "peer_lost" else ErrorKind.INTERNAL
    return WorkerEnd(Why.FAILED, exit_code, cause, kind, fit_text(text))


_CAUSES: dict[ErrorKind, BreakCause] = {
    ErrorKind.ENVIRONMENT: "environment",
    ErrorKind.NUMERIC: "numeric",
    ErrorKind.PEER: "peer_lost",
}


def _describe_failure(failure: Failed, exit_code: int) -> WorkerEnd:
    """Describe the end of a worker that reported its error; the error's kind was decided where it was
    raised."""
    kind = failure.kind
    text = f"{failure.error}: {failure.text}"
    cause: BreakCause = _CAUSES.get(kind, "user_error")
    # A problem of a host never ends the run, even if all ranks agree: another host may not have it.
    is_final = (
        failure.is_final or failure.is_agreed or exit_code == ExitCode.USER_ERROR
    ) and kind is not ErrorKind.ENVIRONMENT
    return WorkerEnd(
        Why.FAILED,
        exit_code,
        cause,
        kind,
        fit_text(text),
        failure.step,
        is_final,
        failure.trouble,
    )


def build_broken(worker: Worker, end: WorkerEnd, *, generation: int) -> Broken:
    """Build the message about a worker that has left its group because of a failure."""
    return Broken(
        generation,
        end.cause,
        rank=worker.rank,
        step=end.step,
        exit_code=end.exit_code,
        message=end.text,
        is_final=end.is_final,
        trouble=end.trouble,
    )


class HostTrouble:
    """Counts the failures of this host. Each is followed by a longer pause; after the third in a row, another
    host must take over."""

    def __init__(self) -> None:
        self._count = 0
        self._step = -1
        self._at = float("-inf")

    def note(self, step: int) -> float | None:
        """Count a failure after ``step``. Returns the pause before the next attempt in seconds, or None to
        give up."""
        now = time.monotonic()
        if step > self._step or now - self._at > UNDISTURBED_SECONDS:
            self._count = 0
        self._count, self._step, self._at = self._count + 1, max(step, self._step), now
        return None if self._count >= _RETRIES else 2.0 ** (self._count - 1)
