"""Compares two runs step by step: samples, losses and all other values that the recipe determines.

Pure.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from evergrad_common.metrics import COLUMNS
from evergrad_trainer.base.records import EvaluationRecord
from evergrad_trainer.observers.events import FieldChange, changes_of
from evergrad_trainer.observers.history import History, Integers, Reals, StepTable

Mask = npt.NDArray[np.bool_]
_Key: TypeAlias = tuple[int, str]
"""Step and set name of an evaluation."""

_COLUMNS = tuple(
    sorted(
        (column for column in COLUMNS if column.compared is not None),
        # Differences of samples explain differences of losses, so they come first. Columns that are only
        # shown come last.
        key=lambda column: (column.compared == "told", column.name != "sample_hash"),
    )
)
"""The compared columns, in the order in which differences are shown."""


@dataclass(frozen=True)
class Rules:
    """The rules by which two runs are compared.

    ``tolerance``: largest relative difference of losses and learning rates. ``exact``: these and gradient
    norms must be equal bit by bit. ``first`` and ``last``: compare only these steps, both included.
    """

    tolerance: float = 1e-5
    exact: bool = False
    first: int | None = None
    last: int | None = None

    def includes(self, step: Any) -> Any:
        """Whether a step (or each of an array) is compared."""
        low = -(2**62) if self.first is None else self.first
        high = 2**62 if self.last is None else self.last
        return (step >= low) & (step <= high)


@dataclass(frozen=True)
class StepDifference:
    """One column that differs. ``a`` and ``b``: the values at the first step that differs.

    ``counts``: whether the runs count as different because of it; otherwise the difference is only shown.
    """

    field: str
    counts: bool
    num_steps: int
    first_step: int
    a: Any
    b: Any
    largest_relative: float | None
    where: str = ""
    """Name of the evaluation set; empty for training steps."""


@dataclass(frozen=True)
class Repeats:
    """Steps that a run has trained more than once. ``ranges``: first and last step, both included."""

    num_steps: int
    ranges: tuple[tuple[int, int], ...]
    num_with_other_samples: int
    """Number of repeated steps that were not trained on the same samples each time."""


@dataclass(frozen=True)
class Comparison:
    """Differences between two runs."""

    num_compared: int
    first_step: int | None
    last_step: int | None
    differences: tuple[StepDifference, ...]
    only_in_a: tuple[tuple[int, int], ...]
    only_in_b: tuple[tuple[int, int], ...]
    evaluations_compared: int
    evaluations_only_in_a: tuple[tuple[int, str], ...]
    evaluations_only_in_b: tuple[tuple[int, str], ...]
    repeats_a: Repeats
    repeats_b: Repeats
    changes_a: tuple[FieldChange, ...] = ()
    """Fields of the manifest that changed during the run. They are shown, but are not a difference."""
    changes_b: tuple[FieldChange, ...] = ()

    @property
    def is_equal(self) -> bool:
        """Same steps on the same samples with agreeing values, and the same evaluations."""
        missing = (
            self.only_in_a,
            self.only_in_b,
            self.evaluations_only_in_a,
            self.evaluations_only_in_b,
        )
        return not any(missing) and not any(
            difference.counts for difference in self.differences
        )


def compare(a: History, b: History, rules: Rules) -> Comparison:
    """Compare two runs, aligned by step; the last row of each step is valid."""
    counting = [run.steps.take(run.steps.last_rows()) for run in (a, b)]
    left, right = (steps.take(rules.includes(steps.step)) for steps in counting)

    # Compare steps that both runs have. A step of only one run is a difference.
    common, of_left, of_right = np.intersect1d(
        left.step, right.step, assume_unique=True, return_indices=True
    )
    a_steps, b_steps = left.take(of_left), right.take(of_right)
    differing = []
    for column in _COLUMNS:
        pair: tuple[npt.NDArray[Any], ...] = (
            getattr(a_steps, column.name),
            getattr(b_steps, column.name),
        )
        is_real = column.compared in ("closely", "by request")
        mask = _disagree(pair, rules) if is_real else pair[0] != pair[1]
        counts = column.compared in ("exactly", "closely") or (rules.exact and is_real)
        differing.append(_differing(column.name, a_steps.step, pair, mask, counts=counts))
    # Metrics of a recipe: only the rows contain their names.
    for name in dict.fromkeys([*a_steps.metrics, *b_steps.metrics]):
        # If only one run has the metric, the values of the other run are NaN.
        nothing = np.full(len(common), np.nan)
        pair = tuple(side.metrics.get(name, nothing) for side in (a_steps, b_steps))
        differing.append(_differing(name, a_steps.step, pair, _disagree(pair, rules)))

    # The last evaluation of each step and set is valid, as for steps.
    evaluations_a, evaluations_b = (
        {
            (one.step, one.name): one
            for one in sorted(run.evaluations, key=lambda one: (one.step, one.name))
            if rules.includes(one.step)
        }
        for run in (a, b)
    )
    shared = [key for key in evaluations_a if key in evaluations_b]
    return Comparison(
        num_compared=len(common),
        first_step=int(common[0]) if len(common) else None,
        last_step=int(common[-1]) if len(common) else None,
        differences=(
            *(one for one in differing if one is not None),
            *_evaluation_differences(
                [(evaluations_a[key], evaluations_b[key]) for key in shared], rules
            ),
        ),
        only_in_a=ranges(np.setdiff1d(left.step, common)),
        only_in_b=ranges(np.setdiff1d(right.step, common)),
        evaluations_compared=len(shared),
        evaluations_only_in_a=_keys_beside(evaluations_a, evaluations_b),
        evaluations_only_in_b=_keys_beside(evaluations_b, evaluations_a),
        repeats_a=_repeats(a.steps, rules),
        repeats_b=_repeats(b.steps, rules),
        changes_a=tuple(change for event in a.events for change in changes_of(event)),
        changes_b=tuple(change for event in b.events for change in changes_of(event)),
    )


def _keys_beside(own: Iterable[_Key], other: Container[_Key]) -> tuple[_Key, ...]:
    return tuple(key for key in own if key not in other)


def _disagree(pair: Sequence[Reals], rules: Rules) -> Mask:
    """Mark where two columns differ: bit by bit, or by more than the tolerance relative to the larger.

    NaN equals NaN.
    """
    a, b = pair
    both_nan = np.isnan(a) & np.isnan(b)
    if rules.exact:
        return np.asarray((a.view(np.uint64) != b.view(np.uint64)) & ~both_nan)
    with np.errstate(invalid="ignore"):
        agrees = (a == b) | (
            np.abs(a - b) <= rules.tolerance * np.maximum(np.abs(a), np.abs(b))
        )
    # An infinite value agrees only with the same infinite value.
    agrees &= (a == b) | (np.isfinite(a) & np.isfinite(b))
    return np.asarray(~agrees & ~both_nan)


def _differing(
    name: str,
    steps: Integers,
    pair: Sequence[npt.NDArray[Any]],
    mask: Mask,
    *,
    counts: bool = True,
    where: str = "",
) -> StepDifference | None:
    """Describe the difference of one column. ``mask`` marks the rows that differ; None if no row differs."""
    rows = np.nonzero(mask)[0]
    if not len(rows):
        return None
    left, right = pair
    first = [column[rows[0]].item() for column in pair]
    shown = [f"{value:016x}" if name == "sample_hash" else value for value in first]
    largest = None
    if left.dtype == np.float64:
        with np.errstate(invalid="ignore", divide="ignore"):
            size = np.maximum(np.abs(left[rows]), np.abs(right[rows]))
            relative = np.abs(left[rows] - right[rows]) / size
        # Ignore infinite and undefined ratios, which would hide the size of the other differences.
        finite = relative[np.isfinite(relative)]
        largest = float(finite.max()) if len(finite) else float("nan")
    return StepDifference(
        field=name,
        counts=counts,
        num_steps=len(rows),
        first_step=int(steps[rows[0]]),
        a=shown[0],
        b=shown[1],
        largest_relative=largest,
        where=where,
    )


def _evaluation_differences(
    pairs: Sequence[tuple[EvaluationRecord, EvaluationRecord]], rules: Rules
) -> list[StepDifference]:
    found = []
    # Compare each set separately, because a difference is shown with the name of its set.
    for where in dict.fromkeys(a.name for a, _ in pairs):
        sides = list(zip(*[pair for pair in pairs if pair[0].name == where], strict=True))
        steps = np.array([one.step for one in sides[0]], np.int64)
        metrics = dict.fromkeys(
            name for side in sides for one in side for name in one.metrics
        )
        tokens = tuple(np.array([one.tokens for one in side], np.int64) for side in sides)
        losses = tuple(np.array([one.loss for one in side], np.float64) for side in sides)
        found.append(
            _differing(
                "loss",
                steps,
                losses,
                _disagree(losses, rules),
                where=where,
            )
        )
        found.append(
            _differing(
                "tokens",
                steps,
                tokens,
                tokens[0] != tokens[1],
                where=where,
            )
        )
        for name in metrics:
            values = tuple(
                np.array([one.metrics.get(name, np.nan) for one in side], np.float64)
                for side in sides
            )
            found.append(
                _differing(
                    name,
                    steps,
                    values,
                    _disagree(values, rules),
                    where=where,
                )
            )
    return [difference for difference in found if difference is not None]


def _repeats(steps: StepTable, rules: Rules) -> Repeats:
    inside = steps.take(rules.includes(steps.step)) if len(steps) else steps
    numbers, counts = np.unique(inside.step, return_counts=True)
    # A step that is trained again must use the same samples, which the hash of the samples shows.
    repeated = numbers[counts > 1]
    rows = np.isin(inside.step, repeated)
    hashes: dict[int, set[int]] = {}
    for step, sample_hash in zip(
        inside.step[rows].tolist(), inside.sample_hash[rows].tolist(), strict=True
    ):
        hashes.setdefault(step, set()).add(sample_hash)
    others = sum(len(found) > 1 for found in hashes.values())
    return Repeats(
        num_steps=len(repeated), ranges=ranges(repeated), num_with_other_samples=others
    )


def ranges(steps: npt.NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of consecutive steps; for example, ``[1, 2, 3, 7]`` gives ``((1, 3), (7, 7))``."""
    if not len(steps):
        return ()
    parts = np.split(steps, np.nonzero(np.diff(steps) != 1)[0] + 1)
    return tuple((int(part[0]), int(part[-1])) for part in parts)
