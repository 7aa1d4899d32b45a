"""The best checkpoint keeps its mark after any event between an evaluation and its save."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loop_run import STEPS, evaluator_of, make_run

from evergrad_trainer.base.errors import FencedError, PeerLostError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.training import loop
from evergrad_trainer.training.components import BestCheckpoint, TrainingComponents
from evergrad_trainer.training.evaluation_counts import EvaluationCounts
from evergrad_trainer.training.loop import train
from evergrad_trainer.training.progress import TrainingProgress, adopt, describe_rank

LOSSES = {3: 2.0, STEPS: 1.0}


class Checkpoints:
    """Saves that are in progress until they are waited for. ``ends`` sets the result: published, failed,
    fenced, or lost with the world."""

    is_saving = False

    def __init__(self, **ends: str) -> None:
        self.ends = {int(name.removeprefix("step_")): end for name, end in ends.items()}
        self.published: Any = None
        self.failures = 0
        self.marked: list[int] = []
        self.under_way: tuple[int, bool] | None = None

    def save(
        self, step: int, tensors: Any, *, best: bool, wait: bool, **options: Any
    ) -> None:
        self.land()
        self.under_way = (step, best)
        if wait:
            self.land()

    def land(self) -> None:
        if self.under_way is None:
            return
        (step, best), self.under_way = self.under_way, None
        end = self.ends.pop(step, "published")
        if end == "lost":
            raise PeerLostError("a rank is gone")
        if end == "published":
            self.published = SimpleNamespace(step=step)
            if best:
                self.marked.append(step)

    def wait(self) -> None:
        is_fenced = (
            self.under_way is not None and self.ends.get(self.under_way[0]) == "fenced"
        )
        self.land()
        if is_fenced:
            raise FencedError("another process has claimed the directory")

    def mark_best(self, step: int) -> None:
        self.land()
        if self.published is not None and self.published.step == step:
            self.marked.append(step)

    def poll(self) -> None:
        """Find nothing: a save is as long as its test needs it to be."""

    def is_fenced(self) -> bool:
        return False


def make(checkpoints: Checkpoints, *, saves_before: bool) -> TrainingComponents:
    run = make_run(BaseObserver(), [])

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        loss = LOSSES[run.progress.finished_steps]
        return SimpleNamespace(loss=loss, metrics={}, weight=1, seconds=0.0)

    return replace(
        run,
        best=BestCheckpoint("heldOut/loss", "min"),
        checkpoints=cast(Any, checkpoints),
        evaluator=evaluator_of(evaluate),
        limits=replace(
            run.limits,
            evaluate_every=3,
            saves_before_evaluation=saves_before,
        ),
    )


def form_next_world(run: TrainingComponents) -> None:
    """Let what this process holds be the state of the next world, as its ranks agree on it."""
    progress, checkpoints = run.progress, run.checkpoints
    row = describe_rank(progress, checkpoints, held_step=progress.finished_steps)
    progress.load_values(dict(progress.values()))
    adopt(progress, [row])


@pytest.mark.parametrize("saves_before", [True, False])
def test_a_best_step_whose_save_ended_with_its_world_is_saved_as_best_by_the_next_world(
    saves_before: bool,
) -> None:
    checkpoints = Checkpoints(step_6="lost")
    run = make(checkpoints, saves_before=saves_before)
    with pytest.raises(PeerLostError):
        train(run)
        checkpoints.wait()
    assert run.progress.best is not None and run.progress.best["step"] == STEPS
    form_next_world(run)
    assert train(run) == "complete"
    checkpoints.wait()
    assert checkpoints.marked == [3, STEPS]


class EndsAtTheMark(Checkpoints):
    """The world ends between the publication of the first best checkpoint and its mark."""

    has_ended = False

    def mark_best(self, step: int) -> None:
        self.wait()
        if not self.has_ended:
            self.has_ended = True
            raise PeerLostError("a rank is gone")
        super().mark_best(step)


def test_a_best_checkpoint_published_before_its_mark_is_marked_by_the_next_world() -> None:
    checkpoints = EndsAtTheMark()
    run = make(checkpoints, saves_before=True)
    with pytest.raises(PeerLostError):
        train(run)
    assert checkpoints.marked == [] and run.progress.finished_steps == 3
    form_next_world(run)
    assert train(run) == "complete"
    assert checkpoints.marked == [3, STEPS]


def test_a_best_step_whose_first_save_failed_is_saved_again() -> None:
    checkpoints = Checkpoints(step_3="failed")
    run = make(checkpoints, saves_before=True)
    train(run)
    assert checkpoints.marked == [3, STEPS]


def test_a_best_step_without_a_checkpoint_does_not_prevent_a_later_best(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its save fails during training, after the evaluation that found it."""
    monkeypatch.setitem(LOSSES, 3, 0.5)
    checkpoints = Checkpoints(step_3="failed")
    run = make(checkpoints, saves_before=False)
    train(run)
    checkpoints.wait()
    assert checkpoints.marked == [STEPS]
    assert run.progress.best is not None and run.progress.best["step"] == STEPS
    assert run.progress.best_before is None


def test_a_later_checkpoint_does_not_record_a_best_step_whose_save_failed() -> None:
    checkpoints = Checkpoints(step_4="failed")
    run = make(checkpoints, saves_before=False)
    before = {"metric": "heldOut/loss", "mode": "min", "value": 3.0, "step": 2}
    progress = run.progress
    progress.resumed_step, progress.saved_step, progress.finished_steps = 2, 4, 4
    progress.best_before, progress.best = before, {**before, "value": 1.0, "step": 4}
    checkpoints.under_way = (4, True)
    said: list[Any] = []
    state = SimpleNamespace(
        tensors=dict, values=lambda: said.append(progress.best) or {"counters": {}}
    )
    run = replace(run, state=cast(Any, state))
    # While its state is there it stays the best, and is saved as that.
    loop._settle_best(run)
    assert progress.best["step"] == 4
    progress.finished_steps = 5
    loop.save_together(run)
    assert said == [before] and progress.best == before


@pytest.mark.parametrize(
    ("values", "waits"),
    [
        ({"other/loss": 0.1}, False),
        ({"heldOut/loss": 4.0}, False),
        ({"heldOut/loss": 2.0}, True),
    ],
    ids=["of another set", "worse than both", "between them"],
)
def test_training_waits_for_the_save_of_the_best_step_only_if_its_result_matters(
    values: dict[str, float], waits: bool
) -> None:
    checkpoints = Checkpoints()
    run = make(checkpoints, saves_before=False)
    progress = run.progress
    before = {"metric": "heldOut/loss", "mode": "min", "value": 3.0, "step": 2}
    progress.best_before, progress.best = before, {**before, "value": 1.0, "step": 4}
    progress.resumed_step, progress.saved_step, progress.finished_steps = 2, 4, 5
    checkpoints.under_way = (4, True)
    loop._keep_best(run, values)
    assert (checkpoints.under_way is None) is waits
    assert progress.best is not None and progress.best["step"] == 4


def test_an_error_of_the_best_save_is_not_raised_on_one_rank_alone() -> None:
    """Others may have noticed its end before, and wait in the next collective."""
    checkpoints = Checkpoints(step_4="fenced")
    run = make(checkpoints, saves_before=False)
    progress = run.progress
    before = {"metric": "heldOut/loss", "mode": "min", "value": 3.0, "step": 2}
    progress.best_before, progress.best = before, {**before, "value": 1.0, "step": 4}
    progress.resumed_step, progress.saved_step, progress.finished_steps = 2, 4, 5
    checkpoints.under_way = (4, True)
    loop._settle_best(run)
    assert progress.best == before


@pytest.mark.parametrize("do_all_know", [True, False])
def test_all_ranks_return_to_the_previous_best_if_one_rank_missed_the_save(
    monkeypatch: pytest.MonkeyPatch, do_all_know: bool
) -> None:
    run = make(Checkpoints(), saves_before=False)
    progress = run.progress
    before = {"metric": "heldOut/loss", "mode": "min", "value": 3.0, "step": 2}
    best = {**before, "value": 1.0, "step": 4}
    progress.best_before, progress.best, progress.finished_steps = before, best, 5
    progress.resumed_step = 4
    monkeypatch.setattr(World, "all_agree", lambda world, own: own and do_all_know)
    loop._settle_best(run)
    assert progress.best == (best if do_all_know else before)


def test_the_previous_best_is_part_of_the_state() -> None:
    checkpoints = Checkpoints()
    run = make(checkpoints, saves_before=False)
    train(run)
    progress = TrainingProgress()
    progress.load_values(dict(run.progress.values()))
    assert progress.best is not None and progress.best["step"] == STEPS
    assert progress.best_before is not None and progress.best_before["step"] == 3


@pytest.mark.capability("T-X10")
@pytest.mark.parametrize(
    ("before", "is_compared"),
    [
        ({"metric": "heldOut/loss", "mode": "min"}, True),
        ({"metric": "heldOut/loss"}, True),
        ({"metric": "heldOut/accuracy", "mode": "min"}, False),
        ({"metric": "heldOut/loss", "mode": "max"}, False),
    ],
    ids=["the same", "of an older version", "another metric", "the other mode"],
)
def test_only_values_of_the_current_deciding_metric_are_compared(
    before: dict[str, Any], is_compared: bool
) -> None:
    checkpoints = Checkpoints()
    run = make(checkpoints, saves_before=True)
    run.progress.best = {**before, "value": 0.5, "step": 1}
    run.progress.resumed_step = 1
    train(run)
    assert checkpoints.marked == ([] if is_compared else [3, STEPS])
    if not is_compared:
        found = {"metric": "heldOut/loss", "mode": "min", "value": 1.0, "step": STEPS}
        assert run.progress.best == found


@pytest.mark.parametrize(
    ("best_step", "steps_here", "is_marked"),
    [(2, 0, True), (2, 5, False), (3, 5, True), (4, 0, False)],
    ids=["a start", "another group", "of the newest step", "not saved"],
)
def test_a_start_marks_the_best_again_because_the_marked_one_may_be_quarantined(
    best_step: int, steps_here: int, is_marked: bool
) -> None:
    run = make(Checkpoints(), saves_before=True)
    done: list[int] = []
    checkpoints = SimpleNamespace(
        mark_best=done.append, poll=lambda: None, published=None, is_saving=False
    )
    progress = run.progress
    progress.finished_steps = progress.saved_step = progress.evaluated_step = 3
    progress.steps_here = steps_here
    progress.best = {
        "metric": "heldOut/loss",
        "mode": "min",
        "value": 0.5,
        "step": best_step,
    }
    limits = replace(run.limits, after_step=3)
    run = replace(run, checkpoints=cast(Any, checkpoints), limits=limits)
    assert train(run) == "after_step"
    assert done == ([best_step] if is_marked else [])
