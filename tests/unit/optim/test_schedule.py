"""Learning rates at listed points: the peak is reached at the end of the warm-up, the minimum one step after
the last."""

import math
from typing import Any

import pytest

from evergrad_manifest.training import Schedule, StepOverride
from evergrad_trainer.optim.schedule import LearningRate, build_schedule, value_at


def schedule(total: int = 100, **settings: Any) -> LearningRate:
    return build_schedule(Schedule.model_validate(settings), peak=2.0, total_steps=total)


@pytest.mark.capability("C-9", "A-9", "A-46", "T-23")
@pytest.mark.parametrize(
    ("settings", "points"),
    [
        ({"type": "constant"}, {1: 2.0, 50: 2.0, 100: 2.0, 1000: 2.0}),
        ({"type": "constant", "warmup": 4}, {1: 0.5, 2: 1.0, 4: 2.0, 5: 2.0, 100: 2.0}),
        ({"type": "linear"}, {1: 2.0, 2: 1.98, 51: 1.0, 100: 0.02, 101: 0.0, 500: 0.0}),
        (
            {"type": "linear", "warmup": 20, "minimumRatio": 0.5},
            {10: 1.0, 20: 2.0, 21: 2.0, 61: 1.5, 101: 1.0},
        ),
        ({"type": "cosine"}, {1: 2.0, 51: 1.0, 26: 1 + math.sqrt(0.5), 101: 0.0}),
        (
            {"type": "cosine", "warmup": "10%", "minimumRatio": 0.1},
            {5: 1.0, 10: 2.0, 11: 2.0, 56: 1.1, 101: 0.2},
        ),
        (
            {"type": "wsd", "warmup": 10, "decay": "20%"},
            {1: 0.2, 10: 2.0, 50: 2.0, 80: 2.0, 81: 2.0, 91: 1.0, 100: 0.1, 101: 0.0},
        ),
        (
            {"type": "wsd", "warmup": 0, "decay": 4},
            {1: 2.0, 97: 2.0, 98: 1.5, 99: 1.0, 100: 0.5, 101: 0.0},
        ),
        ({"type": "wsd", "decay": 0}, {1: 2.0, 100: 2.0}),
    ],
    ids=lambda value: value.get("type", "") if "type" in value else "",
)
def test_rates_at_listed_steps(settings: dict[str, Any], points: dict[int, float]) -> None:
    rate = schedule(**settings)
    assert {step: rate(step) for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.parametrize("type_", ["wsd", "linear", "cosine"])
def test_the_last_step_still_learns_and_no_rate_ever_rises_again(type_: str) -> None:
    rate = schedule(50, type=type_, warmup=5)
    rates = [rate(step) for step in range(1, 51)]
    assert rates[:5] == sorted(rates[:5]) and rates[4:] == sorted(rates[4:], reverse=True)
    assert max(rates) == 2.0 and rates[-1] > 0


def test_one_step_and_a_warm_up_as_long_as_the_run_have_a_rate() -> None:
    assert schedule(1, type="linear")(1) == 2.0
    assert schedule(4, type="cosine", warmup=4)(4) == 2.0
    assert schedule(4, type="wsd", warmup=4, decay=0)(2) == 1.0


def test_an_override_keeps_the_shape_of_the_schedule_at_another_height_from_its_step_on() -> (
    None
):
    overrides = [
        StepOverride.model_validate({"fromStep": 30, "learningRate": 0.5}),
        StepOverride.model_validate({"fromStep": 40, "clipNorm": 2}),
        StepOverride.model_validate({"fromStep": 90, "learningRate": 2}),
    ]
    settings = Schedule.model_validate({"type": "wsd", "warmup": 10, "decay": 20})
    plain = build_schedule(settings, peak=1.0, total_steps=100)
    changed = build_schedule(settings, peak=1.0, total_steps=100, overrides=overrides)
    heights = [changed(step) / plain(step) for step in range(1, 101)]
    assert heights == [1.0] * 29 + [0.5] * 60 + [2.0] * 11


def test_the_last_change_that_has_begun_counts() -> None:
    changes = ((3, 0.3), (7, 0.7))
    assert [value_at(step, 0.0, changes) for step in (1, 2, 3, 6, 7, 99)] == [
        0.0,
        0.0,
        0.3,
        0.3,
        0.7,
        0.7,
    ]
