"""Waits for a run: decides whether a goal is reached or can never be reached, and asks until then.

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
"""An outage may last for hours, and its end should still be noticed soon."""
_ODD_ANSWERS_SECONDS: Final = 300.0
"""Time for which answers that look final are waited out, once the run was seen.

An API server that starts answers 401, 403 or 404 for a minute or two, and a definition that is installed
again is away for as long. A right that was taken away stays away.
"""
STALLED_SECONDS: Final = 30.0
"""Time for which a run has to be Stalled before a wait for it ends: a correction may be on its way."""
_USER_CAUSES: Final = ("user_error", "UserError", "UserFailure")


class Goal(StrEnum):
    """States that can be waited for."""

    COMPLETE = "complete"
    FAILED = "failed"
    RUNNING = "running"
    SUSPENDED = "suspended"


@dataclass(frozen=True)
class WaitOutcome:
    """The answer for now. ``exit_code`` is None while there is reason to wait on."""

    exit_code: int | None
    text: str


def judge(run: Run, goal: Goal) -> WaitOutcome:
    """Whether ``run`` has reached ``goal``, or never will."""
    # The goal comes before the end: a run that was to fail, and has, is a success.
    if goal is Goal.COMPLETE and run.is_true("Complete"):
        return WaitOutcome(ExitCode.DONE, "is complete")
    if goal is Goal.FAILED and run.has_failed:
        return WaitOutcome(ExitCode.DONE, f"has failed{_why(run)}")
    if run.has_failed:
        return WaitOutcome(failure_code(run), f"has failed{_why(run)}")
    if run.is_true("Complete"):
        # A short run may end between two looks, and has been running then.
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
    # Only a status of the newest spec counts: one from before a resume would end the wait at once.
    if goal is Goal.SUSPENDED and run.is_current and run.is_true("Suspended"):
        return WaitOutcome(ExitCode.DONE, "is suspended")
    return WaitOutcome(None, run.phase)


def failure_code(run: Run) -> ExitCode:
    """The exit code that ``evergrad run`` would have had: 64 for a failure that no retry cures, else 70."""
    # Cause and reason count too, because not every failure has an exit code.
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
    """The run of this name. Raises NotFoundError."""
    return parse_run(
        cluster.get(runs_path(cluster.namespace, name), what=f"trainingrun {name}")
    )


@dataclass
class StallWatch:
    """Ends a wait for a run that does not continue unless a person acts, which its condition Stalled says.

    Only this machine's clock counts: the time of the condition is of another one.
    """

    clock: Callable[[], float] = time.monotonic
    _stall: tuple[str, int] | None = None
    _since: float = 0.0

    def judge(self, run: Run) -> WaitOutcome | None:
        """The outcome of the wait, None while there is reason to wait on. Called with each look."""
        # One of an earlier spec is about what may have been corrected.
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
    """Outages of the cluster during a wait: one remark for each, and growing pauses between tries.

    An API server that starts gives answers that look final: not allowed, or unknown. They count as an outage
    for ``_ODD_ANSWERS_SECONDS``.
    """

    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _pause: float = 0.0
    _odd_since: float | None = None

    def outlasts(self, error: EvergradError) -> bool:
        """Whether the wait continues after this answer."""
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
        """Pause before the next try."""
        if not self._pause:
            note(f"{error} Trying again.")
        self._pause = min(_LONGEST_PAUSE_SECONDS, self._pause * 2 or _POLL_SECONDS)
        self.sleep(self._pause)

    def is_well(self) -> None:
        """The cluster has answered."""
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
    """Ask until the goal is reached, can never be, or ``timeout`` is over; the run as last seen.

    ``is_due``: whether what was asked for has been seen by the operator at all; before, nothing is judged.
    ``on_change`` gets every look. A run that is deleted ends the wait, and so does one that waits for a
    person; a cluster that does not answer does not, once it has answered.
    """
    # The run must be there at the first look; from then on an outage is waited out.
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

            # A run may be deleted and created again under its name between two looks.
            if seen is not None and run.uid != seen.uid:
                return WaitOutcome(
                    ExitCode.INTERNAL, "was deleted, and another run of its name created"
                ), seen
            seen = run
            on_change(run)
            outcome = judge(run, goal)
            if outcome.exit_code is not None and is_due(run):
                return outcome, run
            # Nothing that was waited for comes by itself.
            stall = stalls.judge(run) if is_due(run) else None
            if stall is not None:
                return stall, run

        # The deadline comes last, so that the run is looked at once even with no time at all.
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            state = "" if seen is None else f"; it is {seen.phase}{_why(seen)}"
            return WaitOutcome(
                TIMED_OUT, f"was not {goal} within {duration(timeout)}{state}"
            ), seen
        time.sleep(min(_POLL_SECONDS, remaining))


def describe_change(run: Run) -> str:
    """One line about a run, for those who watch it."""
    # A reason that repeats the phase, or an old one of a run that trains, says nothing new.
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
