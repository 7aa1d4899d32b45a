"""Values derived from the recipe: steps, slots and warm-up, exact, and equal to the schedule's values."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evergrad_manifest.derive import derive_steps, slots_per_step, stage_ends
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.training import Training
from evergrad_manifest.training.steps import steps_for_tokens, steps_of
from evergrad_trainer.optim.schedule import build_schedule

BASE = Path(__file__).parent / "base_manifest.yaml"


def training(*overrides: str) -> Training:
    return load_manifest(BASE, overrides=overrides).run.spec.training


@pytest.mark.acceptance("number-T-40")
def test_tokens_are_rounded_up_to_whole_steps() -> None:
    found = derive_steps(training(), num_samples=1000)
    assert found.tokens_per_step == 32 * 256
    assert found.total_steps == 2442
    assert found.tokens == 2442 * 8192 >= 20_000_000
    assert found.samples == 2442 * 32
    assert found.epochs == pytest.approx(2442 * 32 / 1000)
    assert found.slots_per_step == slots_per_step(training().batching) == 8
    assert found.samples_per_step == 32


@pytest.mark.capability("G-6", "O-24", "A-27")
def test_steps_are_used_unchanged() -> None:
    override = "spec.training.horizon={steps: 7}"
    assert derive_steps(training(override), num_samples=10**9).total_steps == 7


def test_epochs_of_a_run_that_starts_at_a_position_count_its_own_steps_only() -> None:
    run = training("spec.training.horizon={steps: 7}")
    found = derive_steps(run, num_samples=64, steps_before=5)
    assert (found.epochs, found.total_steps, found.samples) == (1.0, 7, 7 * 32)
    # A horizon that the other run has reached is refused elsewhere.
    assert derive_steps(run, num_samples=64, steps_before=9).epochs == 0


@pytest.mark.capability("C-43", "A-12")
@pytest.mark.parametrize(
    ("epochs", "samples", "steps"),
    [("1", 32, 1), ("1", 33, 2), ("0.1", 320, 1), ("2.5", 64, 5), ("3", 10**9, 93_750_000)],
)
def test_epochs_are_passes_over_all_sources_rounded_up(
    epochs: str, samples: int, steps: int
) -> None:
    assert (
        derive_steps(
            training(f"spec.training.horizon={{epochs: {epochs}}}"), num_samples=samples
        ).total_steps
        == steps
    )


def test_a_tenth_of_an_epoch_is_exactly_a_tenth() -> None:
    # In floats 0.1 * 30 is 3.0000000000000004, which would round up to one step more.
    batching = "spec.training.batching={globalBatchSize: 3, microBatchSize: 1}"
    found = derive_steps(
        training(batching, "spec.training.horizon={epochs: 0.1}", "spec.nodes.max=2"),
        num_samples=30,
    )
    assert found.total_steps == 1


@pytest.mark.acceptance("number-A-46")
@pytest.mark.capability("C-10", "T-24", "T-25")
def test_warm_up_and_decay_are_resolved_to_steps() -> None:
    found = derive_steps(training("spec.training.horizon={steps: 1000}"), num_samples=1)
    assert (found.warmup_steps, found.decay_steps) == (50, 200)
    plain = derive_steps(
        training(
            "spec.training.horizon={steps: 1000}",
            "spec.training.schedule={type: cosine, warmup: 30}",
        ),
        num_samples=1,
    )
    assert (plain.warmup_steps, plain.decay_steps) == (30, 0)


def test_shares_that_fill_the_horizon_never_exceed_it() -> None:
    override = "spec.training.schedule={warmup: 50%, decay: 50%}"
    for steps in range(1, 50):
        found = derive_steps(
            training(override, f"spec.training.horizon={{steps: {steps}}}"), num_samples=1
        )
        assert found.warmup_steps + found.decay_steps <= steps


def test_a_warm_up_that_is_too_long_for_the_data_is_refused() -> None:
    long = training(
        "spec.training.horizon={epochs: 1}",
        "spec.training.schedule={warmup: 100}",
        "spec.training.stop.afterStep=99",
    )
    assert derive_steps(long, num_samples=125 * 32).total_steps == 125
    with pytest.raises(ConfigurationError) as refused:
        derive_steps(long, num_samples=32)
    assert [problem.path for problem in refused.value.problems] == [
        "spec.training.schedule.warmup",
        "spec.training.stop.afterStep",
    ]


@pytest.mark.acceptance("input-G-52")
@pytest.mark.capability("G-52")
def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="contain no training samples"):
        derive_steps(training(), num_samples=0)


@given(st.integers(1, 10**18), st.integers(1, 2**24), st.integers(8, 2**20))
def test_steps_for_tokens_are_the_fewest_sufficient(
    tokens: int, samples: int, length: int
) -> None:
    steps = steps_for_tokens(tokens, samples=samples, length=length)
    assert steps * samples * length >= tokens > (steps - 1) * samples * length


@pytest.mark.parametrize("total", [1, 2, 3, 7, 10, 99, 1000, 2442])
@pytest.mark.parametrize("warmup", [0, 1, "5%", "33%", "100%"])
@pytest.mark.parametrize("kind", ["wsd", "cosine", "linear", "constant"])
def test_the_derived_steps_are_the_steps_that_the_schedule_uses(
    total: int, warmup: int | str, kind: str
) -> None:
    decay = ", decay: 0" if kind == "wsd" else ""
    settings = training(
        f"spec.training.horizon={{steps: {total}}}",
        f"spec.training.schedule={{type: {kind}, warmup: {warmup}{decay}}}",
    )
    derived = derive_steps(settings, num_samples=1)
    schedule = build_schedule(settings.schedule, peak=1.0, total_steps=total)
    assert (
        derived.warmup_steps
        == schedule.warmup_steps
        == min(total, steps_of(settings.schedule.warmup, total))
    )
    if kind == "wsd":
        assert derived.decay_steps == schedule.decay_steps


TWO_STAGES = "spec.training.recipe=two_stage_kl"


def staged(tokens: str, *overrides: str) -> Training:
    section = f"spec.training.twoStageKl={{stages: [{{tokens: {tokens}}}, {{}}]}}"
    return training(TWO_STAGES, section, *overrides)


@pytest.mark.acceptance("8d-10a:two_stage_kl", "number-T-64", "input-5e-19")
@pytest.mark.capability("T-40", "T-64")
@pytest.mark.parametrize(
    ("tokens", "end"),
    [("1", 1), ("8191", 1), ("8192", 1), ("8193", 2), ("10M", 1221), ("81920", 10)],
)
def test_the_second_stage_starts_at_the_first_step_that_starts_at_or_after_its_boundary(
    tokens: str, end: int
) -> None:
    """Steps of 8,192 tokens: step ``end`` + 1 starts at ``end`` times as many."""
    found = derive_steps(staged(tokens), num_samples=1000)
    assert found.stage_ends == stage_ends(staged(tokens)) == (end,)
    boundary = 10_000_000 if tokens == "10M" else int(tokens)
    assert (end - 1) * 8192 < boundary <= end * 8192


def test_a_boundary_beyond_a_horizon_in_epochs_is_refused_once_its_length_is_known() -> (
    None
):
    epochs = "spec.training.horizon={epochs: 1}"
    assert derive_steps(staged("8192", epochs), num_samples=64).stage_ends == (1,)
    with pytest.raises(ConfigurationError, match="no step is left for the second stage"):
        derive_steps(staged("8193", epochs), num_samples=64)


def test_a_run_without_stages_has_no_boundary() -> None:
    assert derive_steps(training(), num_samples=1000).stage_ends == ()
