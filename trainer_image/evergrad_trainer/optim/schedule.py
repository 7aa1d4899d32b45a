"""The learning rate as a pure function of the step, so that nothing needs to be saved or restored.

A schedule is a warm-up and a curve. Curves are registered by name in :data:`CURVES`, and the transitions
between two ratios in :data:`SHAPES`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from evergrad_manifest.training import Schedule, StepOverride
from evergrad_manifest.training.steps import steps_of


@dataclass(frozen=True)
class Point:
    """A step of the curve, the ratio to the peak at this step, and the shape of the transition to it."""

    step: int
    ratio: float
    shape: str


@dataclass(frozen=True)
class LearningRate:
    """Learning rate of step s, for s from 1 to ``total_steps`` and beyond, where it keeps its last value.

    Warm-up rises linearly from ``start_ratio`` (step 0) and reaches the peak at step ``warmup_steps``.
    ``wsd`` then keeps the peak, and decays over its last ``decay_steps``; ``linear``, ``cosine`` and
    ``polynomial`` decay from the end of the warm-up. All of these would reach ``peak * minimum_ratio`` one
    step after the last step, because a last step with rate 0 would be wasted. ``pieces`` reaches the ratio of
    each point at its step.
    """

    type: str
    peak: float
    total_steps: int
    warmup_steps: int
    decay_steps: int
    minimum_ratio: float
    peaks: tuple[tuple[int, float], ...] = ()
    """First step and peak of each override, ascending. An override scales the curve and keeps its shape."""
    start_ratio: float = 0.0
    decay_shape: str = "linear"
    power: float = 1.0
    points: tuple[Point, ...] = ()
    """Ends of the pieces, ascending by step."""

    def __call__(self, step: int) -> float:
        # An override scales the whole curve: the steps and shapes of warm-up and decay stay the same.
        peak = value_at(step, self.peak, self.peaks)
        if step < self.warmup_steps:
            if not self.start_ratio:
                return peak * step / self.warmup_steps
            done = step / self.warmup_steps
            return peak * (self.start_ratio + (1 - self.start_ratio) * done)
        return peak * CURVES[self.type](self, step)

    def share_of_decay(self, step: int, length: int) -> float:
        """Return how much of a decay over the last ``length`` steps is done, from 0 to 1.

        The value would be 1 one step after the last step.
        """
        # Count from the previous step, so that the rate of the last step is still above the minimum.
        done = step - 1 - (self.total_steps - length)
        return 0.0 if done <= 0 or length == 0 else min(1.0, done / length)

    @property
    def after_warmup(self) -> int:
        """Number of steps after the warm-up."""
        return self.total_steps - self.warmup_steps


def _decaying(shape: str) -> Callable[[LearningRate, int], float]:
    """Return a curve that decays in one shape over all steps after the warm-up."""

    def value(rate: LearningRate, step: int) -> float:
        share = rate.share_of_decay(step, rate.after_warmup)
        return SHAPES[shape](1.0, rate.minimum_ratio, share)

    return value


def _polynomial(rate: LearningRate, step: int) -> float:
    share = rate.share_of_decay(step, rate.after_warmup)
    shape = _falling(lambda share: (1 - share) ** rate.power)
    return shape(1.0, rate.minimum_ratio, share)


def _pieces(rate: LearningRate, step: int) -> float:
    begin, ratio = rate.warmup_steps, 1.0
    for point in rate.points:
        if step < point.step:
            share = (step - begin) / (point.step - begin)
            return SHAPES[point.shape](ratio, point.ratio, share)
        begin, ratio = point.step, point.ratio
    return ratio


CURVES: Final[Mapping[str, Callable[[LearningRate, int], float]]] = {
    "wsd": lambda rate, step: SHAPES[rate.decay_shape](
        1.0, rate.minimum_ratio, rate.share_of_decay(step, rate.decay_steps)
    ),
    "linear": _decaying("linear"),
    "cosine": _decaying("cosine"),
    "constant": lambda rate, step: 1.0,
    "polynomial": _polynomial,
    # Vaswani et al. 2017, section 5.3, scaled to 1 at the end of the warm-up.
    "inverseSquareRoot": lambda rate, step: math.sqrt(max(1, rate.warmup_steps) / step),
    "pieces": _pieces,
}
"""Curve of each schedule by name: the ratio to the peak at a step after the warm-up."""


def _falling(remaining: Callable[[float], float]) -> Callable[[float, float, float], float]:
    """Return a shape whose remaining distance to the end is a function of the share of steps that are
    done."""

    def value(start: float, end: float, share: float) -> float:
        # Return exactly the start before the first step: the sum below may have a rounding error.
        return end + (start - end) * remaining(share) if share > 0 else start

    return value


SHAPES: Final[Mapping[str, Callable[[float, float, float], float]]] = {
    "linear": _falling(lambda share: 1 - share),
    "cosine": _falling(lambda share: (1 + math.cos(math.pi * share)) / 2),
    # Twice the linear shape minus the cosine shape.
    "mirrorCosine": _falling(
        lambda share: 2 * (1 - share) - (1 + math.cos(math.pi * share)) / 2
    ),
    # Each step multiplies the value by the same factor.
    "exponential": lambda start, end, share: float(start ** (1 - share) * end**share),
    "square": _falling(lambda share: 1 - share * share),
    "squareRoot": _falling(lambda share: 1 - math.sqrt(share)),
}
"""Shape of each name: the value at (start, end, share of the steps that are done)."""


def value_at(step: int, value: float, changes: Sequence[tuple[int, float]]) -> float:
    """Return the value at ``step``: the value of the last item in ``changes`` whose first step is reached.

    ``changes`` contains (first step, value) in ascending order. Before the first change, returns ``value``.
    """
    begun = [changed for first, changed in changes if first <= step]
    return begun[-1] if begun else value


def build_schedule(
    settings: Schedule,
    *,
    peak: float,
    total_steps: int,
    overrides: Sequence[StepOverride] = (),
) -> LearningRate:
    """Build the schedule over ``total_steps`` steps.

    The code that derives the number of steps checks that warm-up, decay and pieces fit into it.
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
        start_ratio=settings.start_ratio,
        decay_shape=settings.decay_shape,
        power=settings.power,
        points=tuple(
            Point(steps_of(one.until, total_steps), one.ratio, one.shape)
            for one in settings.pieces
        ),
    )
