"""Learning rates at listed points: the peak is reached at the end of the warm-up, the minimum one step after
the last."""

import math
from typing import Any

import pytest

from evergrad_manifest.model.fields import choices_of, fields_of
from evergrad_manifest.training import Piece, Schedule, StepOverride
from evergrad_trainer.optim.schedule import (
    CURVES,
    SHAPES,
    LearningRate,
    build_schedule,
    value_at,
)


def schedule(total: int = 100, **settings: Any) -> LearningRate:
    return build_schedule(Schedule.model_validate(settings), peak=2.0, total_steps=total)


@pytest.mark.acceptance("8d-9a", "number-A-46")
@pytest.mark.capability("A-9", "A-46")
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


@pytest.mark.acceptance("number-O-76")
@pytest.mark.capability("O-76")
@pytest.mark.parametrize(
    ("settings", "points"),
    [
        # 1 - x^2, 1 - √x, c^x and twice the line less the cosine at x = 0.25, 0.5, 0.75 of the last 40 steps.
        (
            {"decayShape": "square"},
            {60: 2.0, 61: 2.0, 71: 1.875, 81: 1.5, 91: 0.875, 101: 0.0},
        ),
        ({"decayShape": "squareRoot"}, {61: 2.0, 71: 1.0, 81: 2 - math.sqrt(2), 101: 0.0}),
        (
            {"decayShape": "exponential", "minimumRatio": 0.0625},
            {61: 2.0, 71: 1.0, 81: 0.5, 91: 0.25, 101: 0.125, 300: 0.125},
        ),
        (
            {"decayShape": "cosine", "minimumRatio": 0.5},
            {61: 2.0, 71: 1.5 + math.sqrt(0.5) / 2, 81: 1.5, 101: 1.0},
        ),
        (
            {"decayShape": "mirrorCosine"},
            {61: 2.0, 71: 3 - 1 - math.sqrt(0.5), 81: 1.0, 91: math.sqrt(0.5), 101: 0.0},
        ),
    ],
    ids=lambda value: value.get("decayShape", ""),
)
def test_the_final_decay_has_the_configured_shape(
    settings: dict[str, Any], points: dict[int, float]
) -> None:
    rate = schedule(type="wsd", decay=40, **settings)
    assert {step: rate(step) for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.acceptance("number-O-76")
@pytest.mark.parametrize(
    ("settings", "points"),
    [
        (
            {"type": "polynomial", "power": 2, "minimumRatio": 0.2},
            {1: 2.0, 26: 0.4 + 1.6 * 0.5625, 51: 0.8, 101: 0.4},
        ),
        ({"type": "polynomial"}, {1: 2.0, 51: 1.0, 100: 0.02, 101: 0.0}),
        (
            {"type": "inverseSquareRoot", "warmup": 16},
            {8: 1.0, 16: 2.0, 25: 1.6, 64: 1.0, 100: 0.8, 400: 0.4},
        ),
        ({"type": "inverseSquareRoot"}, {1: 2.0, 4: 1.0, 100: 0.2}),
        # A start divisor of 100: from 0.02 at step 0.
        (
            {"type": "wsd", "warmup": 10, "startRatio": 0.01, "decay": 10},
            {1: 0.218, 5: 1.01, 9: 1.802, 10: 2.0, 91: 2.0, 96: 1.0},
        ),
    ],
    ids=[
        "polynomial",
        "polynomial of power 1",
        "inverseSquareRoot",
        "no warm-up",
        "startRatio",
    ],
)
def test_rates_of_the_other_named_schedules(
    settings: dict[str, Any], points: dict[int, float]
) -> None:
    rate = schedule(**settings)
    assert {step: rate(step) for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.acceptance("8d-9a", "number-G-81")
@pytest.mark.capability("G-81")
def test_a_tail_of_two_pieces_has_the_published_points() -> None:
    # GenoLeWM's wsd for 100 steps and a warm-up of 10: 1 → 0.1 by 98 % of the rest, then 0.1 → 0.01.
    pieces = [
        {"until": 82, "ratio": 1},
        {"until": 98, "ratio": 0.1},
        {"until": 100, "ratio": 0.01},
    ]
    rate = schedule(type="pieces", warmup=10, pieces=pieces)
    points = {
        1: 0.1,
        10: 1,
        11: 1,
        82: 1,
        90: 0.55,
        98: 0.1,
        99: 0.055,
        100: 0.01,
        200: 0.01,
    }
    assert {step: rate(step) / 2 for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.acceptance("number-T-55")
@pytest.mark.capability("T-8", "T-55")
def test_pieces_can_describe_two_decays_with_a_hold_and_a_cosine_with_a_second_warm_up() -> (
    None
):
    twice = [
        {"until": "49%", "ratio": 1},
        {"until": "50%", "ratio": 0.1},
        {"until": "99%", "ratio": "10%"},
        {"until": "100%", "ratio": 0.01},
    ]
    rate = schedule(1000, type="pieces", warmup="1%", startRatio="1%", pieces=twice)
    points = {
        5: 0.505,
        10: 1,
        490: 1,
        495: 0.55,
        500: 0.1,
        990: 0.1,
        995: 0.055,
        1000: 0.01,
    }
    assert {step: rate(step) / 2 for step in points} == pytest.approx(points, abs=1e-12)

    again = [
        {"until": 40, "ratio": 0.1, "shape": "cosine"},
        {"until": 50, "ratio": 0.8},
        {"until": 90, "ratio": 0.05, "shape": "exponential"},
    ]
    rate = schedule(type="pieces", pieces=again)
    points = {20: 0.55, 40: 0.1, 45: 0.45, 50: 0.8, 70: 0.2, 90: 0.05, 100: 0.05}
    assert {step: rate(step) / 2 for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.acceptance("number-T-55")
def test_a_wsd_with_relative_lengths_has_the_published_points() -> None:
    # Theseus' wsd: from 1 % over 0.5 % of the steps, and over the last 1 % to 1 %.
    shares = {"warmup": "0.5%", "startRatio": "1%", "decay": "1%", "minimumRatio": "1%"}
    rate = schedule(1000, type="wsd", **shares)
    points = {1: 0.208, 4: 0.802, 5: 1, 500: 1, 991: 1, 996: 0.505, 1000: 0.109, 1001: 0.01}
    assert {step: rate(step) / 2 for step in points} == pytest.approx(points, abs=1e-12)


@pytest.mark.acceptance("input-4e-15")
def test_each_schedule_type_of_the_manifest_is_registered() -> None:
    assert set(choices_of(fields_of(Schedule)["type"])) == set(CURVES)
    assert set(choices_of(fields_of(Schedule)["decayShape"])) == set(SHAPES)
    assert set(choices_of(fields_of(Piece)["shape"])) == set(SHAPES)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_starts_and_ends_at_the_given_values(shape: str) -> None:
    assert SHAPES[shape](0.7, 0.3, 0.0) == 0.7
    assert SHAPES[shape](0.7, 0.3, 1.0) == pytest.approx(0.3, abs=1e-15)


def test_without_a_decay_the_rate_is_constant_even_after_the_horizon() -> None:
    assert schedule(type="wsd", decay=0)(500) == 2.0
    assert schedule(type="cosine", warmup=100)(500) == 2.0


@pytest.mark.parametrize("type_", ["wsd", "linear", "cosine"])
def test_the_last_step_has_a_positive_rate_and_no_decayed_rate_rises(type_: str) -> None:
    rate = schedule(50, type=type_, warmup=5)
    rates = [rate(step) for step in range(1, 51)]
    assert rates[:5] == sorted(rates[:5]) and rates[4:] == sorted(rates[4:], reverse=True)
    assert max(rates) == 2.0 and rates[-1] > 0


def test_a_run_of_one_step_or_of_warm_up_only_has_a_rate() -> None:
    assert schedule(1, type="linear")(1) == 2.0
    assert schedule(4, type="cosine", warmup=4)(4) == 2.0
    assert schedule(4, type="wsd", warmup=4, decay=0)(2) == 1.0


def test_an_override_scales_the_schedule_from_its_step_on() -> None:
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


def test_the_last_override_that_has_started_applies() -> None:
    changes = ((3, 0.3), (7, 0.7))
    assert [value_at(step, 0.0, changes) for step in (1, 2, 3, 6, 7, 99)] == [
        0.0,
        0.0,
        0.3,
        0.3,
        0.7,
        0.7,
    ]
