"""Waits for a run: polls it, and decides whether a goal is reached or can never be reached.

Times in seconds.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from evergrad_cli.cluster.client.api_client import Cluster, runs_path
from evergrad_cli.cluster.client.arguments import note
from evergrad_cli.cluster.client.errors import (
    TIMED_OUT,
    NotFoundError,
    RefusedError,
    UnreachableError,
)
from evergrad_cli.cluster.render.runs import Run, parse_run
from evergrad_common.contract import ExitCode
from evergrad_common.text import duration
from evergrad_manifest.errors import EvergradError

_POLL_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 15.0
"""Longest pause between two tries. An outage may last for hours, and its end should be noticed within
seconds."""
_ODD_ANSWERS_SECONDS: Final = 300.0
"""Time for which a wait continues after answers that look final, if the run was seen before.

An API server that starts answers 401, 403 or 404 for up to two minutes, and so does an API server whose CRD
is being installed again. A permission that was removed stays removed.
"""
STALLED_SECONDS: Final = 30.0
"""Time for which a run must be Stalled before a wait for it ends, because a correction may follow."""
_USER_CAUSES: Final = ("user_error", "UserError", "UserFailure")


class Goal(StrEnum):
    """States that a command can wait for."""

    COMPLETE = "complete"
    FAILED = "failed"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class WaitOutcome:
    """The current outcome of a wait. ``exit_code`` is None if the wait continues."""

    exit_code: int | None
    text: str


def judge(run: Run, goal: Goal) -> WaitOutcome:
    """Return whether ``run`` has reached ``goal``, or never will."""
    # Check the goal before the end: for the goal ``failed``, a failed run is a success.
    if goal is Goal.COMPLETE and run.is_true("Complete"):
        return WaitOutcome(ExitCode.DONE, "is complete")
    if goal is Goal.FAILED and run.has_failed:
        return WaitOutcome(ExitCode.DONE, f"has failed{_why(run)}")
    if run.has_failed:
        return WaitOutcome(failure_code(run), f"has failed{_why(run)}")
    if run.is_true("Complete"):
        # A short run may end between two polls. It was running in between.
        is_reached = goal is Goal.RUNNING
        return WaitOutcome(
            ExitCode.DONE if is_reached else ExitCode.INTERNAL, "is complete"
        )
    if (
        goal is Goal.RUNNING
        and run.is_current
        and run.phase == "Running"
        and not run.wants_suspension
    ):
        return WaitOutcome(
            ExitCode.DONE, f"is running{f' on {run.nodes} nodes' if run.nodes else ''}"
        )
    # Only a status of the newest spec counts: the status from before a resume would end the wait immediately.
    if goal is Goal.SUSPENDED and run.is_current and run.is_true("Suspended"):
        return WaitOutcome(ExitCode.DONE, "is suspended")
    return WaitOutcome(None, run.phase)


def failure_code(run: Run) -> ExitCode:
    """Return the exit code that ``evergrad run`` would have: 64 for a failure that a retry cannot fix,
    otherwise 70."""
    # Check cause and reason, too, because not every failure has an exit code.
    failure = run.last_failure
    is_users = failure is not None and (
        failure.exit_code == ExitCode.USER_ERROR or failure.cause in _USER_CAUSES
    )
    return (
        ExitCode.USER_ERROR if is_users or run.reason in _USER_CAUSES else ExitCode.INTERNAL
    )


def _why(run: Run) -> str:
    failed = run.condition("Failed")
    reason = run.reason or (failed.reason if failed else "")
    message = run.message or (failed.message if failed else "")
    text = f"; {reason}" if reason else ""
    return f"{text}: {message}" if message else text


def read_run(cluster: Cluster, name: str) -> Run:
    """Return the run of this name. Raises NotFoundError."""
    return parse_run(
        cluster.get(runs_path(cluster.namespace, name), what=f"trainingrun {name}")
    )


@dataclass
class StallWatch:
    """Ends a wait for a run that needs the user, as its condition Stalled shows.

    Uses only this machine's clock, because the time of the condition comes from another machine.
    """

    clock: Callable[[], float] = time.monotonic
    _stall: tuple[str, int] | None = None
    _since: float = 0.0

    def judge(self, run: Run) -> WaitOutcome | None:
        """Return the outcome of the wait, or None if the wait continues. Call it at each poll."""
        # A condition for an earlier spec may describe a problem that is already corrected.
        if run.is_over or not run.is_current or not run.is_true("Stalled"):
            self._stall = None
            return None
        stall = run.uid, run.generation
        if stall != self._stall:
            self._stall, self._since = stall, self.clock()
        if self.clock() - self._since < STALLED_SECONDS:
            return None
        return WaitOutcome(ExitCode.USER_ERROR, f"waits for you{_why(run)}")


@dataclass
class WaitLimits:
    """Handles outages of the cluster during a wait: prints one remark for each outage, and pauses longer
    after each try.

    An API server that starts gives answers that look final: not allowed, or unknown. They count as an outage
    for ``_ODD_ANSWERS_SECONDS``.
    """

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _pause: float = 0.0
    _odd_since: float | None = None

    def outlasts(self, error: EvergradError) -> bool:
        """Return whether the wait continues after this error."""
        if isinstance(error, UnreachableError):
            self._odd_since = None
            return True
        is_odd = (isinstance(error, NotFoundError) and error.is_kind_unknown) or (
            isinstance(error, RefusedError) and error.may_pass
        )
        if not is_odd:
            return False
        now = self.clock()
        self._odd_since = now if self._odd_since is None else self._odd_since
        return now - self._odd_since < _ODD_ANSWERS_SECONDS

    def after(self, error: EvergradError) -> None:
        """Print a remark after the first error of an outage, and pause before the next try."""
        if not self._pause:
            note(f"{error} Trying again.")
        self._pause = min(_LONGEST_PAUSE_SECONDS, self._pause * 2 or _POLL_SECONDS)
        self.sleep(self._pause)

    def is_well(self) -> None:
        """Note that the cluster has answered, which ends an outage."""
        if self._pause:
            note("The cluster answers again.")
        self._pause, self._odd_since = 0.0, None


def wait_for(
    cluster: Cluster,
    name: str,
    goal: Goal,
    *,
    timeout: float,
    is_due: Callable[[Run], bool] = lambda run: True,
    on_change: Callable[[Run], None] = lambda run: None,
) -> tuple[WaitOutcome, Run | None]:
    """Poll until the goal is reached, cannot be reached, or ``timeout`` is over. Return the outcome and the
    last state of the run.

    ``is_due``: returns whether the operator has seen the requested change; until then, the wait does not end.
    ``on_change`` receives the run at every poll. The wait also ends if the run is deleted or needs the user.
    After the first answer, it continues through outages of the cluster.
    """
    # The run must exist at the first poll. After that, wait until an outage ends.
    deadline, seen = time.monotonic() + timeout, None
    patience, stalls = WaitLimits(), StallWatch()
    while True:
        try:
            run = read_run(cluster, name)
        except (NotFoundError, RefusedError, UnreachableError) as error:
            if seen is None:
                raise
            if not patience.outlasts(error):
                if isinstance(error, NotFoundError) and not error.is_kind_unknown:
                    return WaitOutcome(ExitCode.INTERNAL, "was deleted"), seen
                raise
            run = None
            if time.monotonic() < deadline:
                patience.after(error)
        if run is not None:
            patience.is_well()

            # A run may be deleted and created again with the same name between two polls.
            if seen is not None and run.uid != seen.uid:
                return WaitOutcome(
                    ExitCode.INTERNAL, "was deleted, and another run of its name created"
                ), seen
            seen = run
            on_change(run)
            outcome = judge(run, goal)
            if outcome.exit_code is not None and is_due(run):
                return outcome, run
            # A stalled run does not reach the goal without the user.
            stall = stalls.judge(run) if is_due(run) else None
            if stall is not None:
                return stall, run

        # Check the deadline last, so that the run is polled once even with a timeout of 0.
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            state = "" if seen is None else f"; it is {seen.phase}{_why(seen)}"
            return WaitOutcome(
                TIMED_OUT, f"was not {goal} within {duration(timeout)}{state}"
            ), seen
        time.sleep(min(_POLL_SECONDS, remaining))


def describe_change(run: Run) -> str:
    """Describe the state of a run in one line."""
    # Leave out a reason that repeats the phase, and an old reason of a run that trains: they add nothing.
    parts = [run.phase]
    if run.phase != "Running" and run.reason and run.reason != run.phase:
        parts.append(run.reason)
    if run.nodes:
        parts.append(f"nodes {run.nodes}")
    if run.step is not None:
        parts.append(
            f"step {run.step}/{run.total_steps}" if run.total_steps else f"step {run.step}"
        )
    values = (("loss", run.loss), ("tok/s", run.tokens_per_second), ("ETA", run.eta))
    parts += [f"{label} {value}" for label, value in values if value]
    if run.phase not in ("Running", "Complete") and run.message:
        parts.append(run.message)
    return "  ".join(parts)
