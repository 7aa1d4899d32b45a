"""The steps of a run: their number and size, when the run stops, and values that replace values of the recipe
from a step on."""

from collections.abc import Iterator
from math import isqrt
from typing import Annotated, Final, Literal

from pydantic import Field, Strict

from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.view import UNKNOWN, View
from evergrad_manifest.training.common import (
    LENGTH_WITHOUT_DATA,
    OF_TEXT,
    ROWS_A_PAIR,
    TRAINING,
    reads_pairs,
)
from evergrad_manifest.values.numbers import Count, Real

HORIZON: Final = f"{TRAINING}.horizon"
_GLOBAL: Final = f"{TRAINING}.batching.globalBatchSize"
_MICRO: Final = f"{TRAINING}.batching.microBatchSize"
_LENGTH: Final = f"{TRAINING}.data.sequenceLength"
_AFTER_STEP: Final = f"{TRAINING}.stop.afterStep"


class Batching(Section):
    """How many samples make a step, and how the step is cut into slots."""

    global_batch_size: Count = Field(ge=1, le=2**24)
    """Samples in each optimizer step, G, for every number of processes."""
    micro_batch_size: Count = Field(ge=1, le=2**20)
    """Samples in each forward pass, b. A step has M = G / b slots, and up to M processes can share them."""


def check_batching(view: View) -> Iterator[Problem]:
    """Check that a step divides into micro-batches of equal size."""
    if (found := view.known(_GLOBAL, _MICRO)) is None:
        return
    whole, micro = found
    if micro > whole:
        remedy = f"Lower it to at most {whole}, or raise globalBatchSize"
        yield Problem(
            _MICRO,
            f"{micro} is larger than globalBatchSize {whole}",
            "a micro-batch is a part of a step",
            remedy,
        )
    elif whole % micro:
        below, above = nearest_divisors(whole, micro)
        remedy = (
            f"Use a globalBatchSize of {whole - whole % micro} or {whole - whole % micro + micro}, "
            f"or a microBatchSize of {below} or {above}"
        )
        why = "a step is cut into micro-batches of equal size"
        yield Problem(
            _GLOBAL, f"{whole} is not divisible by microBatchSize {micro}", why, remedy
        )


def nearest_divisors(number: int, near: int) -> tuple[int, int]:
    """Return the largest divisor of ``number`` up to ``near``, and the smallest from ``near`` on. ``near`` is
    in 1..number."""
    divisors = divisors_of(number)
    return max(d for d in divisors if d <= near), min(d for d in divisors if d >= near)


def divisors_of(number: int) -> set[int]:
    """Return all divisors of ``number`` ≥ 1, in O(√number)."""
    small = [divisor for divisor in range(1, isqrt(number) + 1) if number % divisor == 0]
    return {*small, *(number // divisor for divisor in small)}


def slots_of(view: View) -> tuple[int, int, int] | None:
    """Return (M, G, b) if they are known and M is whole, otherwise None. A script has no slots."""
    if (
        view.get(TRAINING) is None
        or (found := view.known(_GLOBAL, _MICRO)) is None
        or found[0] % found[1]
    ):
        return None
    whole, micro = found
    return whole // micro, whole, micro


class Horizon(Section):
    """How long the run is. Exactly one of the three; the others are derived."""

    steps: Count | None = Field(default=None, ge=1, le=10**12)
    """Number of optimizer steps."""
    epochs: Real | None = Field(default=None, gt=0, le=10**6)
    """Number of passes over all sources together, rounded up to whole steps."""
    exhausted: Literal["first", "all"] | None = None
    """End by the epochs of single sources. ``first``: before the first source has given more than its own.
    ``all``: once all sources have. Default: by the epochs of all sources together."""
    tokens: Count | None = Field(default=None, ge=1, le=10**18)
    """Number of tokens to train on, rounded up to whole steps."""


def check_horizon(view: View) -> Iterator[Problem]:
    """Check that exactly one of steps, epochs and tokens is set."""
    if view.get(HORIZON) is UNKNOWN:
        return
    given = [
        name for name in ("steps", "epochs", "tokens") if view.is_given(f"{HORIZON}.{name}")
    ]
    if not given:
        yield Problem(
            HORIZON,
            "has no length",
            "one of steps, epochs and tokens is needed",
            "Add one of them",
        )
    elif len(given) > 1:
        names = " and ".join((", ".join(given[:-1]), given[-1]))
        verb = "both" if len(given) == 2 else "all"
        yield Problem(
            HORIZON,
            f"{names} are {verb} set",
            "the horizon is exactly one of them",
            "Keep one, remove the rest",
        )


def check_exhausted(view: View) -> Iterator[Problem]:
    """Check that ``exhausted`` is used only with a horizon in epochs and one mixture."""
    path, recipe = f"{HORIZON}.exhausted", view.get(f"{TRAINING}.recipe")
    if not view.is_given(path):
        return
    if view.get(HORIZON) is not UNKNOWN and not view.is_given(f"{HORIZON}.epochs"):
        remedy = "Set epochs instead, such as `epochs: 1`, or remove it"
        yield Problem(path, "has no meaning without epochs", "", remedy)
    if view.is_given(f"{TRAINING}.twoStageKl"):
        why = "each stage has a mixture of its own, and ends by its tokens"
        yield Problem(path, f"has no meaning with recipe {recipe}", why, "Remove it")


def total_steps_of(view: View) -> int | None:
    """Return the steps of the whole run if they do not depend on the data, otherwise None."""
    given = [
        name for name in ("steps", "epochs", "tokens") if view.is_given(f"{HORIZON}.{name}")
    ]
    if given == ["steps"]:
        steps = view.get(f"{HORIZON}.steps")
        return None if steps is UNKNOWN else int(steps)
    found = view.known(f"{HORIZON}.tokens", _GLOBAL)
    if given != ["tokens"] or found is None:
        return None

    # A task that prepares its own data names no sources. For a recipe of text, another rule reports missing
    # sources.
    length = view.get(_LENGTH)
    if not view.is_given(f"{TRAINING}.data"):
        is_own = view.get(f"{TRAINING}.recipe") not in (*OF_TEXT, UNKNOWN)
        length = LENGTH_WITHOUT_DATA if is_own else UNKNOWN
    if length is UNKNOWN:
        return None
    if reads_pairs(view):
        length *= ROWS_A_PAIR
    return steps_for_tokens(found[0], samples=found[1], length=length)


def steps_for_tokens(tokens: int, *, samples: int, length: int) -> int:
    """Return the number of steps that train at least ``tokens`` tokens, with ``samples`` samples of
    ``length`` tokens in each step."""
    return -(-tokens // (samples * length))


Metric = Annotated[str, Field(min_length=1, max_length=128)]
"""``loss``, ``grad_norm``, a metric of the recipe, or ``<evaluation set>/<metric>``."""


class EarlyStop(Section):
    """The end of a run that gets no better, its state saved."""

    metric: Metric
    """Metric as in ``monitors[].metric``, for example ``heldOut/loss``."""
    mode: Literal["min", "max"] = "min"
    """Whether smaller (``min``) or larger (``max``) values are better."""
    patience: Count = Field(ge=1, le=10**9)
    """Number of values in a row without an improvement after which the run stops."""
    min_delta: Real = Field(default=0.0, ge=0, le=1e6)
    """Smallest change that counts as an improvement."""


class Stop(Section):
    """When to stop before the horizon."""

    after_step: Count | None = Field(default=None, ge=1)
    """Save and stop when this step is finished. The schedule still follows the horizon."""
    early: EarlyStop | None = None
    """Save and stop when a metric does not improve. You can change it while the run trains."""


def check_stop(after_step: int | None, *, total: int) -> list[Problem]:
    """Return a problem if the stop step is not within the horizon."""
    if after_step is None or after_step <= total:
        return []
    why = "the run ends before that step"
    remedy = f"Lower it to at most {total}, remove it, or lengthen the horizon"
    return [
        Problem(
            _AFTER_STEP, f"{after_step} is beyond the horizon of {total} steps", why, remedy
        )
    ]


def check_stop_fits(view: View) -> Iterator[Problem]:
    """Check that the stop step is within the horizon, if the horizon does not depend on the data."""
    total, after_step = total_steps_of(view), view.get(_AFTER_STEP)
    if total is not None and after_step is not UNKNOWN:
        yield from check_stop(after_step, total=total)


def steps_of(amount: int | float, total: int) -> int:
    """Return a number of steps unchanged, and a fraction (a float) as a share of ``total``, rounded to whole
    steps."""
    return round(amount * total) if isinstance(amount, float) else amount


def show_steps(amount: int | float, total: int) -> str:
    return (
        f"{amount * 100:g}% ({steps_of(amount, total)} steps)"
        if isinstance(amount, float)
        else f"{amount} steps"
    )


class OnNonFinite(Section):
    """Action after a step whose loss or gradient norm is not finite.

    The state before it is always saved first.
    """

    skip: int = Field(default=0, ge=0, le=1000, strict=True)
    """Number of such steps in a row that are skipped: they are counted and make no update."""
    then: Literal["stop"] = "stop"
    """What happens if more such steps follow in a row. ``stop``: the run saves its state and stops, and you
    can resume it."""


SkippedStep = Annotated[int, Strict(), Field(ge=1, le=10**12)]
"""A plain number, without units: a rule for each item of a list would exceed the cost budget of API
servers."""


class StepOverride(Section):
    """Values that replace those of the recipe from a step on, until the next one says otherwise."""

    from_step: Count = Field(ge=1, le=10**12)
    """First step that uses these values. A step that was trained before you added them does not change."""
    learning_rate: Real | None = Field(default=None, gt=0, le=10)
    """Peak learning rate. Warm-up and decay still follow the schedule."""
    clip_norm: Real | None = Field(default=None, ge=0)
    """Maximum global norm of the gradients; larger gradients are scaled down. 0 disables clipping."""


def check_overrides(view: View) -> Iterator[Problem]:
    """Check that each override replaces a value, from a step that is within the run and after the override
    before it."""
    # Use one loop: compare each override with the one before it and with the end.
    total, last = total_steps_of(view), 0
    for path, item in view.items(f"{TRAINING}.overrides"):
        first, here = item["fromStep"], format_path((*path, "fromStep"))
        if item["learningRate"] is None and item["clipNorm"] is None:
            remedy = "Add learningRate or clipNorm, or remove it; steps are skipped by training.skipSteps"
            yield Problem(
                format_path(path), "replaces nothing", "it has only a step", remedy
            )
        if first is UNKNOWN:
            continue
        if first <= last:
            what = f"{first} is not after {last}, the step of the override before"
            yield Problem(
                here,
                what,
                "their order decides which one applies",
                "Sort them, or join those of one step",
            )
        elif total is not None and first > total:
            why, remedy = (
                "the run ends before that step",
                f"Lower it to at most {total}, or remove it",
            )
            yield Problem(
                here, f"{first} is beyond the horizon of {total} steps", why, remedy
            )
        last = max(last, first)


RULES: Final = (
    check_overrides,
    check_horizon,
    check_exhausted,
    check_batching,
    check_stop_fits,
)
