"""Names in a checkpoints directory and the order of checkpoints."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad_trainer.checkpoint.layout import (
    Version,
    attempt_name,
    checkpoint_names,
    generation_name,
    parse_attempt_name,
    parse_checkpoint_name,
    parse_generation_name,
)

numbers = st.integers(0, 10**12)


@given(numbers, numbers, numbers)
def test_every_published_checkpoint_name_contains_its_step(
    step: int, generation: int, serial: int
) -> None:
    version = Version(step, generation, serial)
    parsed = [parse_checkpoint_name(name) for name in checkpoint_names(version)]
    assert parsed == [Version(step, 0, 0), Version(step, generation, 0), version]
    assert parse_attempt_name(attempt_name(version)) == version


@given(numbers)
def test_a_generation_is_parsed_from_its_name(generation: int) -> None:
    assert parse_generation_name(generation_name(generation)) == generation


def test_generation_names_sort_like_their_numbers() -> None:
    assert sorted(generation_name(number) for number in (10, 9, 100)) == [
        "000009",
        "000010",
        "000100",
    ]


@pytest.mark.parametrize(
    "name",
    [
        "step-",
        "step-x",
        "step-1.",
        "step-1.g",
        "step-1.tmp",
        "xstep-1",
        "step-1~2",
        "gen",
        "step-١",
    ],
)
def test_other_names_are_not_checkpoints(name: str) -> None:
    assert parse_checkpoint_name(name) is None


def test_checkpoints_are_ordered_by_step_then_generation_then_serial() -> None:
    versions = [Version(10, 9, 9), Version(20, 1, 2), Version(20, 2, 1), Version(20, 1, 1)]
    assert sorted(versions) == [
        Version(10, 9, 9),
        Version(20, 1, 1),
        Version(20, 1, 2),
        Version(20, 2, 1),
    ]
