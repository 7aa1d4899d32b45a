"""Learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evergrad_manifest.training import Schedule, StepOverride
from evergrad_manifest.training.steps import steps_of


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of step s, for s from 1 to ``total_steps`` and beyond (it stays at its last value).

    Warm-up rises linearly and reaches the peak at step ``warmup_steps``. ``wsd`` then stays, and decays
    linearly over its last ``decay_steps``; ``linear`` and ``cosine`` decay from the end of the warm-up. All
    three are on their way to ``peak * minimum_ratio``, which the step after the last would have: a last step
    at rate 0 would be wasted.
    """

    type: str
    peak: float
    total_steps: int
    warmup_steps: int
    decay_steps: int
    minimum_ratio: float
    peaks: tuple[tuple[int, float], ...] = ()
    """First step and peak of each override, ascending: the same shape, at another height."""

    def __call__(self, step: int) -> float:
        # Overrides move the whole curve: warm-up and decay keep their steps and their shape.
        peak = value_at(step, self.peak, self.peaks)
        if step < self.warmup_steps:
            return peak * step / self.warmup_steps
        if self.type == "constant":
            return peak

        length = self.total_steps - self.warmup_steps
        if self.type == "wsd":
            length = self.decay_steps
        # From the step before, so that the last step of the horizon is still above the minimum.
        done = step - 1 - (self.total_steps - length)
        if done <= 0:
            return peak

        # The share of the decay that is left: 1 at the peak, 0 at the end.
        share = min(1.0, done / length)
        remaining = 1 - share
        if self.type == "cosine":
            remaining = (1 + math.cos(math.pi * share)) / 2
        ratio = self.minimum_ratio + (1 - self.minimum_ratio) * remaining
        return peak * ratio


def value_at(step: int, value: float, changes: Sequence[tuple[int, float]]) -> float:
    """``value``, or that of the last of ``changes`` (first step, value; ascending) that has begun by
    ``step``."""
    begun = [changed for first, changed in changes if first <= step]
    return begun[-1] if begun else value


def build_schedule(
    settings: Schedule, *, peak: float, total_steps: int, overrides: Sequence[StepOverride] = ()
) -> LearningRate:
    """Build the schedule over a horizon of ``total_steps``.

    That warm-up and decay fit is checked where the horizon is derived.
    """
    warmup = min(steps_of(settings.warmup, total_steps), total_steps)
    decay = min(steps_of(settings.decay, total_steps), total_steps - warmup)
    peaks = [(one.from_step, one.learning_rate) for one in overrides]
    return LearningRate(
        type=settings.type,
        peak=peak,
        total_steps=total_steps,
        warmup_steps=warmup,
        decay_steps=decay,
        minimum_ratio=settings.minimum_ratio,
        peaks=tuple((first, height) for first, height in peaks if height is not None),
    )
