"""Exact sums of an evaluation, which may be cut anywhere."""

import json
import math
import random

import pytest

from evergrad_trainer.training.evaluation_counts import EvaluationCounts

SOURCE = random.Random(3)
NUMBERS = [SOURCE.uniform(-1, 1) * 10 ** SOURCE.randint(-20, 20) for _ in range(500)]


def through_json(tally: EvaluationCounts) -> EvaluationCounts:
    return EvaluationCounts.from_json(
        json.loads(json.dumps(tally.to_json())), key=tally.key, names=tally.names
    )


@pytest.mark.parametrize("width", [1, 7, 500])
def test_the_mean_is_the_exactly_rounded_sum_for_any_interruption(
    width: int,
) -> None:
    tally = EvaluationCounts("key")
    for first in range(0, len(NUMBERS), width):
        part = NUMBERS[first : first + width]
        tally.add([part], num_batches=len(part), weight=len(part))
        tally = through_json(tally)
    assert tally.done == tally.weight == 500
    assert tally.means() == [math.fsum(NUMBERS) / 500]


def test_sums_do_not_depend_on_the_order() -> None:
    forward, backward = EvaluationCounts("key"), EvaluationCounts("key")
    forward.add([NUMBERS], num_batches=500, weight=9)
    backward.add([NUMBERS[::-1]], num_batches=500, weight=9)
    assert forward.to_json()["sums"] == backward.to_json()["sums"]


@pytest.mark.parametrize(
    ("numbers", "mean"),
    [
        ([1.0, math.inf], math.inf),
        ([-math.inf, 2.0], -math.inf),
        ([math.inf, -math.inf], math.nan),
        ([1.0, math.nan, 2.0], math.nan),
        ([1.7e308, 1.7e308], math.inf),
    ],
)
def test_non_finite_numbers_appear_in_the_mean(numbers: list[float], mean: float) -> None:
    tally = EvaluationCounts("key")
    for number in numbers:
        tally.add([[number]], num_batches=1, weight=1)
        tally = through_json(tally)
    # A sum beyond all floats is infinite, and so is its mean.
    assert tally.means() == [pytest.approx(mean, nan_ok=True)]


def test_a_set_without_weight_has_no_mean() -> None:
    tally = EvaluationCounts("key", ("a",))
    tally.add([[0.0], [0.0]], num_batches=1, weight=0)
    assert all(math.isnan(mean) for mean in tally.means())


@pytest.mark.parametrize(("key", "names"), [("other", ("a",)), ("key", ("a", "b"))])
def test_a_measurement_with_other_settings_counts_nothing(
    key: str, names: tuple[str, ...]
) -> None:
    tally = EvaluationCounts("key", ("a",))
    tally.add([[1.0], [2.0]], num_batches=1, weight=1)
    found = EvaluationCounts.from_json(tally.to_json(), key=key, names=names)
    assert (found.done, found.weight, len(found.sums)) == (0, 0, 1 + len(names))
    assert EvaluationCounts.from_json({}, key=key, names=names).done == 0
