"""Steps that the API server has refused a run: each refused step is tried again after a pause of its own,
the rest goes on."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from evergrad_operator.observe import NAME_TAKEN, ApplyFailure

Step = tuple[str, str, str]
"""Verb, kind and name: what is to be done with one object."""
READS: Final = frozenset({"get", "list"})
FIRST_RETRY: Final = 1.0
LONGEST_RETRY: Final = 60.0
"""Seconds between two tries of a step that is refused again and again."""
_CONFLICT: Final = 409
_LONGEST_CONFLICT_SECONDS: Final = 5.0
"""For an object of an older run of the same name, which is about to go: nothing announces that the name is
free."""


@dataclass(frozen=True)
class Refusal:
    """One refused step: how often in a row, at which generation of the run, and when it is tried again."""

    failure: ApplyFailure
    count: int
    generation: int
    retry_at: float


class Refusals:
    """The steps of one run that the API server, or the run's coordinator, has refused. Times: seconds since
    1970.

    A new generation of the run is tried at once: what was refused may be what was changed.
    """

    def __init__(self) -> None:
        self._refusals: dict[Step, Refusal] = {}

    def failures(self) -> tuple[ApplyFailure, ...]:
        """Return the steps that were refused at their last try."""
        return tuple(refusal.failure for refusal in self._refusals.values())

    def find_waiting(self, step: Step, *, generation: int, now: float) -> ApplyFailure | None:
        """Why the step is not to be tried yet; None if it is."""
        refusal = self._refusals.get(step)
        is_waiting = (
            refusal is not None and refusal.generation == generation and now < refusal.retry_at
        )
        return refusal.failure if refusal is not None and is_waiting else None

    def has(self, step: Step) -> bool:
        """Whether the step was refused at its last try."""
        return step in self._refusals

    def note(self, failure: ApplyFailure, *, generation: int, at_least: float = 0.0) -> None:
        """Note a refusal. ``at_least``: seconds that the API server asked to wait."""
        step = failure.verb, failure.kind, failure.name
        known = self._refusals.get(step)
        count = 1 if known is None else known.count + 1
        # A conflict ends by itself within seconds; anything else may last, and is tried ever more rarely.
        is_brief = failure.status == _CONFLICT and failure.reason != NAME_TAKEN
        longest = _LONGEST_CONFLICT_SECONDS if is_brief else LONGEST_RETRY
        pause = min(longest, FIRST_RETRY * 2.0 ** min(count - 1, 10))
        self._refusals[step] = Refusal(
            failure, count, generation, failure.at + max(pause, min(at_least, LONGEST_RETRY))
        )

    def clear(self, step: Step) -> None:
        """Forget the refusals of a step that was done, or that is not needed any more."""
        self._refusals.pop(step, None)

    def keep(self, steps: Collection[Step]) -> None:
        """Forget the refusals of all steps but these, and of reads: nobody would ever try them again."""
        self._refusals = {
            step: refusal
            for step, refusal in self._refusals.items()
            if step in steps or step[0] in READS
        }

    def seconds_to_next(self, now: float) -> float | None:
        """Until the next refused step is tried again; None if nothing is refused.

        A step whose time has come and that this pass has not tried stands behind another one, which has its
        own time: the pods beyond a quota behind the first of them, all pods behind the claim. It causes no
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
