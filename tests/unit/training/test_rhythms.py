"""When a run saves: by steps, tokens and seconds, and which checkpoints are kept forever."""

import itertools
from dataclasses import replace
from typing import Any, cast

import pytest
from loop_run import STEPS, make_run

from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.training.components import Rhythm, TrainingComponents
from evergrad_trainer.training.loop import train


def saves_of(run: TrainingComponents) -> dict[int, dict[str, Any]]:
    """Return the steps that the run saves while it trains, with the values that are saved with the
    tensors."""
    saves: dict[int, dict[str, Any]] = {}

    def save(step: int, tensors: Any, *, extra: dict[str, Any], **options: Any) -> None:
        assert step not in saves
        saves[step] = extra

    cast(Any, run.checkpoints).save = save
    train(run)
    return saves


@pytest.mark.acceptance("number-T-45", "input-5e-16")
@pytest.mark.capability("T-45")
def test_a_rhythm_in_tokens_is_due_at_the_step_that_reaches_each_multiple() -> None:
    rhythm = Rhythm(10, per_step=4)
    assert [step for step in range(1, 11) if rhythm.is_due(step)] == [3, 5, 8, 10]
    assert [step for step in range(1, 7) if Rhythm(3).is_due(step)] == [3, 6]
    # More than one multiple in a step.
    assert all(Rhythm(3, per_step=7).is_due(step) for step in range(1, 9))


@pytest.mark.capability("O-20", "O-54", "O-56")
def test_permanent_checkpoints_are_saved_in_addition_and_marked() -> None:
    run = make_run(BaseObserver(), [])
    run.limits = replace(run.limits, save_every=Rhythm(3), keep_every=Rhythm(8, per_step=4))
    saves = saves_of(run)
    assert list(saves) == [2, 3, 4, 6]
    assert [step for step, extra in saves.items() if extra.get("permanent")] == [2, 4, 6]
    assert [extra["tokens"] for extra in saves.values()] == [8, 12, 16, 24]


def test_a_save_for_another_reason_at_a_permanent_step_is_permanent() -> None:
    run = make_run(BaseObserver(), [])
    run.limits = replace(run.limits, save_every=Rhythm(100), keep_every=Rhythm(4))
    run.progress.finished_steps, run.progress.is_save_lost = 4, True
    saves = saves_of(run)
    assert list(saves) == [4] and saves[4]["permanent"] is True


def test_a_rhythm_in_seconds_follows_the_clock_of_rank_0() -> None:
    run = make_run(BaseObserver(), [])
    run.limits = replace(run.limits, save_every=None, save_seconds=4)
    run.clock, run.saved_at = lambda: 2.0 * run.progress.finished_steps, 0.0
    assert list(saves_of(run)) == [3, 6]
    assert STEPS == 6


def multiples(every: int | None) -> set[int]:
    return set() if every is None else set(range(every, STEPS + 1, every))


@pytest.mark.capability("O-49", "T-33", "C-12")
@pytest.mark.acceptance("8d-7a")
@pytest.mark.parametrize(
    ("save", "keep", "evaluate", "is_first"),
    list(itertools.product([100, 2, 3], [None, 4], [None, 1, 2, 3], [False, True])),
)
def test_saves_permanent_saves_and_evaluations_each_have_their_own_cadence(
    save: int, keep: int | None, evaluate: int | None, is_first: bool
) -> None:
    done: list[tuple[str, int]] = []
    run = make_run(BaseObserver(), done)
    run.limits = replace(
        run.limits,
        save_every=Rhythm(save),
        keep_every=None if keep is None else Rhythm(keep),
        evaluate_every=evaluate,
        saves_before_evaluation=is_first,
    )
    permanent: dict[int, bool] = {}

    def note(step: int, tensors: Any, *, extra: dict[str, Any], **options: Any) -> None:
        done.append(("save", step))
        permanent[step] = bool(extra.get("permanent"))

    cast(Any, run.checkpoints).save = note
    assert train(run) == "complete"

    # The last step is evaluated with any cadence; the code that ends the run saves it.
    evaluated = multiples(evaluate) | {STEPS}
    saved = multiples(save) | multiples(keep) | (evaluated if is_first else set())
    assert [step for what, step in done if what == "evaluate"] == sorted(evaluated)
    assert [step for what, step in done if what == "save"] == sorted(saved)
    assert {step for step, kept in permanent.items() if kept} == multiples(keep)
    for step in evaluated & saved:
        order = [what for what, at in done if at == step]
        assert order == (["save", "evaluate"] if is_first else ["evaluate", "save"])
