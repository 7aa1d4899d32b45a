"""Steps that the API server has refused a run: each is tried again after a pause of its own, and the others
go on."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from evergrad_operator.core.observe.observe import NAME_LEFT, NAME_TAKEN, ApplyFailure

Step = tuple[str, str, str]
"""Verb, kind and name of one object."""
FIRST_RETRY: Final = 1.0
LONGEST_RETRY: Final = 60.0
"""Longest time, in seconds, between two tries of a step that is refused again and again."""
_CONFLICT: Final = 409
_LONGEST_CONFLICT_SECONDS: Final = 5.0
"""Longest pause after a conflict with an object of an older run of the same name, which is about to go: no
event shows that the name is free."""


@dataclass(frozen=True)
class Refusal:
    """One refused step: how often in a row, at which generation of the run, and when it is tried again."""

    failure: ApplyFailure
    count: int
    generation: int
    retry_at: float


class Refusals:
    """The steps of one run that the API server, or the run's coordinator, has refused.

    Times are seconds since 1970. A new generation of the run is tried at once: the edit may have corrected
    the mistake.
    """

    def __init__(self) -> None:
        self._refusals: dict[Step, Refusal] = {}

    def failures(self) -> tuple[ApplyFailure, ...]:
        """Return the steps that were refused at their last try."""
        return tuple(refusal.failure for refusal in self._refusals.values())

    def find_waiting(
        self,
        step: Step,
        *,
        generation: int,
        now: float,
    ) -> ApplyFailure | None:
        """Return the refusal for which the step is not tried yet; None if it is tried."""
        refusal = self._refusals.get(step)
        if refusal is None or refusal.generation != generation:
            return None
        return refusal.failure if now < refusal.retry_at else None

    def has(self, step: Step) -> bool:
        """Whether the step was refused at its last try."""
        return step in self._refusals

    def note(
        self,
        failure: ApplyFailure,
        *,
        generation: int,
        at_least: float = 0.0,
    ) -> None:
        """Note a refusal. ``at_least``: seconds that the API server has asked us to wait."""
        step = failure.verb, failure.kind, failure.name
        known = self._refusals.get(step)
        count = 1 if known is None else known.count + 1
        # A conflict ends by itself within seconds; anything else may last, and is tried ever more rarely.
        is_brief = failure.status == _CONFLICT and failure.reason not in (
            NAME_LEFT,
            NAME_TAKEN,
        )
        longest = _LONGEST_CONFLICT_SECONDS if is_brief else LONGEST_RETRY
        doubled = FIRST_RETRY * 2.0 ** min(count - 1, 10)
        # The server's own wish is bounded, too: it may have recovered long before.
        pause = max(min(longest, doubled), min(at_least, LONGEST_RETRY))
        self._refusals[step] = Refusal(
            failure,
            count,
            generation,
            retry_at=failure.at + pause,
        )

    def clear(self, step: Step) -> None:
        """Forget the refusals of a step that was done, or that is no longer needed."""
        self._refusals.pop(step, None)

    def keep(self, steps: Collection[Step]) -> None:
        """Forget the refusals of all steps but these: nobody would ever try them again."""
        self._refusals = {
            step: refusal for step, refusal in self._refusals.items() if step in steps
        }

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next refused step is tried again; None if nothing is refused.

        A step whose time has come, but which this pass has not tried, waits for another one, which has a
        time of its own: the pods beyond a quota for the first of them, all pods for the claim. It causes no
        pass by itself, or there would be no end of passes.
        """
        if not self._refusals:
            return None
        times = [
            refusal.retry_at - now
            for refusal in self._refusals.values()
            if refusal.retry_at > now
        ]
        return min(times, default=FIRST_RETRY)
