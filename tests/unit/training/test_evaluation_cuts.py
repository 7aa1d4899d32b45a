"""The partial results of an interrupted evaluation are saved, even if its step was saved before."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loop_run import evaluator_of, make_run

from evergrad_trainer.distributed.world import World
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.training.components import TrainingComponents
from evergrad_trainer.training.evaluation_counts import EvaluationCounts
from evergrad_trainer.training.loop import save_together, train
from evergrad_trainer.training.progress import TrainingProgress


class Preempted:
    """A run with a stop request in each evaluation: in start n after ``batches[n]`` batches."""

    def __init__(self, batches: Sequence[int], *, saves_before: bool) -> None:
        self.saved: list[dict[str, Any]] = []
        self.begun_at: list[int] = []
        self._batches = iter(batches)
        self._progress = TrainingProgress()
        self._saves_before = saves_before

    def start(self) -> int:
        """Train until the stop, and save; the number of saves of this start."""
        progress, before = TrainingProgress(), len(self.saved)
        if self.saved:
            # As a start from the newest checkpoint.
            progress.load_values(self.saved[-1])
            progress.saved_step = progress.resumed_step = progress.finished_steps
        run = self._run(progress)
        assert train(run) == "signal"
        save_together(run)
        assert progress.saved_step == progress.finished_steps == 3
        return len(self.saved) - before

    def _run(self, progress: TrainingProgress) -> TrainingComponents:
        run = make_run(BaseObserver(), [])
        checkpoints = SimpleNamespace(**vars(run.checkpoints))

        def save(step: int, tensors: Any, **options: Any) -> None:
            self.saved.append(copy.deepcopy(dict(progress.values())))
            checkpoints.published = SimpleNamespace(step=step)

        def evaluate(
            one: Any, world: World, tally: EvaluationCounts, **options: Any
        ) -> None:
            self.begun_at.append(tally.done)
            num_batches = next(self._batches)
            tally.add(
                [[0.5] * num_batches], num_batches=num_batches, weight=2 * num_batches
            )

        checkpoints.save = save
        limits = replace(
            run.limits, evaluate_every=3, saves_before_evaluation=self._saves_before
        )
        is_signalled = lambda: progress.finished_steps == 3  # noqa: E731
        return replace(
            run,
            progress=progress,
            limits=limits,
            checkpoints=cast(Any, checkpoints),
            evaluator=evaluator_of(evaluate),
            is_signalled=is_signalled,
        )


@pytest.mark.acceptance("8d-3c")
@pytest.mark.capability("O-18", "O-68")
@pytest.mark.parametrize("saves_before", [True, False])
def test_each_interruption_of_an_evaluation_is_saved_so_that_the_evaluation_can_end(
    saves_before: bool,
) -> None:
    run = Preempted([4, 3, 2], saves_before=saves_before)
    assert [run.start(), run.start(), run.start()] == [1 + saves_before, 1, 1]
    assert run.begun_at == [0, 4, 7]
    assert run.saved[-1]["tallies"]["heldOut"]["done"] == 9


def test_an_interruption_before_the_first_batch_does_not_save_a_step_again() -> None:
    run = Preempted([4, 0], saves_before=False)
    assert [run.start(), run.start()] == [1, 0]


def test_a_step_whose_evaluation_has_ended_is_not_saved_again() -> None:
    done: list[tuple[str, int]] = []
    run = make_run(BaseObserver(), done)

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        tally.add([[0.5]], num_batches=1, weight=2)
        return SimpleNamespace(loss=1.0, metrics={}, weight=1, seconds=0.0)

    limits = replace(run.limits, saves_before_evaluation=True)
    run = replace(run, limits=limits, evaluator=evaluator_of(evaluate))
    assert train(run) == "complete"
    run.checkpoints.published = cast(Any, SimpleNamespace(step=run.progress.finished_steps))
    save_together(run)
    assert done == [("save", run.progress.finished_steps)]
