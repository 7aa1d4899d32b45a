"""The refused steps of a run. Each step is retried after its own pause and does not delay the other steps."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.observe.observe import NAME_LEFT, NAME_TAKEN, ApplyFailure

Step = tuple[str, str, str]
"""Verb, kind and name of one object."""
FIRST_RETRY: Final = 1.0
LONGEST_RETRY: Final = 60.0
"""Maximum seconds between two tries of a step that is refused repeatedly."""
_CONFLICT: Final = 409
_LONGEST_CONFLICT_SECONDS: Final = 5.0
"""Maximum pause, in seconds, after a conflict with an object of an older run of the same name.

That object is about to be deleted, but no event reports that the name is free.
"""


@dataclass(frozen=True)
class Refusal:
    """One refused step: consecutive refusals, the run's generation, and the time of the retry."""

    failure: ApplyFailure
    count: int
    generation: int
    retry_at: float


class Refusals:
    """The steps of one run that the API server, or the run's coordinator, has refused.

    Times are seconds since 1970. If the run has a new generation, a step is retried without a pause, because
    the edit may have corrected the cause.
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
        """Return the refusal whose pause is not over, or None if the step may be tried now."""
        refusal = self._refusals.get(step)
        if refusal is None or refusal.generation != generation:
            return None
        return refusal.failure if now < refusal.retry_at else None

    def has(self, step: Step) -> bool:
        """Return whether the step was refused at its last try."""
        return step in self._refusals

    def note(
        self,
        failure: ApplyFailure,
        *,
        generation: int,
        at_least: float = 0.0,
    ) -> None:
        """Record a refusal. ``at_least``: seconds to wait according to the API server's Retry-After."""
        step = failure.verb, failure.kind, failure.name
        known = self._refusals.get(step)
        count = 1 if known is None else known.count + 1
        # A conflict ends within seconds. Other causes may last, so their pause doubles with each refusal.
        is_brief = failure.status == _CONFLICT and failure.reason not in (
            NAME_LEFT,
            NAME_TAKEN,
        )
        longest = _LONGEST_CONFLICT_SECONDS if is_brief else LONGEST_RETRY
        delay = find_delay(count, first=FIRST_RETRY, longest=longest)
        # Bound Retry-After, too, because the server may recover earlier.
        pause = max(delay, min(at_least, LONGEST_RETRY))
        self._refusals[step] = Refusal(
            failure,
            count,
            generation,
            retry_at=failure.at + pause,
        )

    def clear(self, step: Step) -> None:
        """Drop the refusal of a step that has succeeded or is no longer needed."""
        self._refusals.pop(step, None)

    def keep(self, steps: Collection[Step]) -> None:
        """Drop the refusals of all other steps, because no pass will try them again."""
        self._refusals = {
            step: refusal for step, refusal in self._refusals.items() if step in steps
        }

    def seconds_to_next(self, now: float) -> float | None:
        """Return the seconds until the next refused step is retried, or None if no step is refused.

        If a step is due but this pass has not tried it, the step waits for another refused step, which has
        its own time. For example, the pods beyond a quota wait for the first of them, and all pods wait for
        the claim. Such a step must not cause a pass, or passes would follow each other without a pause.
        """
        if not self._refusals:
            return None
        times = [
            refusal.retry_at - now
            for refusal in self._refusals.values()
            if refusal.retry_at > now
        ]
        return min(times, default=FIRST_RETRY)
