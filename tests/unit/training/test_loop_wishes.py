"""Requests of observers: all ranks carry them out at the boundary of the step before which one of them
requested it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from loop_run import STEPS, Steps, evaluator_of, make_run

from evergrad_trainer.base.errors import FencedError, PeerLostError
from evergrad_trainer.base.records import EvaluationRecord, Wish
from evergrad_trainer.distributed.world import World
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.stateful_observers import Lasting
from evergrad_trainer.training.components import Rhythm
from evergrad_trainer.training.evaluation_counts import EvaluationCounts
from evergrad_trainer.training.exchange import FLAG_FENCED, FLAG_OBSERVER_OFF, NUM_FLAGS
from evergrad_trainer.training.loop import train
from evergrad_trainer.training.progress import MOST_TALLIES_BYTES, TrainingProgress
from evergrad_trainer.training.step_parts import StepOutcome


class Asking(BaseObserver):
    """Asks for one thing before step 3, on this rank."""

    def __init__(self, wish: Wish) -> None:
        self.asked = 0
        self._wish = wish

    def wishes(self) -> frozenset[Wish]:
        self.asked += 1
        return frozenset({self._wish}) if self.asked == 3 else frozenset()


@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ("save", [("save", 3), ("evaluate", STEPS)]),
        ("evaluate", [("evaluate", 3), ("evaluate", STEPS)]),
    ],
)
def test_a_request_is_executed_once_after_its_step(
    wish: Wish, expected: list[tuple[str, int]]
) -> None:
    done: list[tuple[str, int]] = []
    assert train(make_run(Asking(wish), done)) == "complete"
    assert done == expected


def test_a_request_to_stop_ends_the_run_at_the_boundary_of_that_step() -> None:
    run = make_run(Asking("stop"), [])
    assert train(run) == "observer"
    assert run.progress.finished_steps == 3


def test_an_evaluation_interrupted_by_a_change_is_repeated_and_reported_once() -> None:
    class Listening(Asking):
        def __init__(self) -> None:
            super().__init__("evaluate")
            self.heard: list[tuple[str, int]] = []

        def evaluation_end(self, record: EvaluationRecord) -> None:
            self.heard.append((record.name, record.step))

    observer, done, measured = Listening(), list[tuple[str, int]](), list[str]()
    run = make_run(observer, done)

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        measured.append(one.name)
        # Between the two sets of the first evaluation the ranks agree to leave.
        is_cut = len(measured) == 2
        return (
            None if is_cut else SimpleNamespace(loss=1.0, metrics={}, weight=1, seconds=0.0)
        )

    sets = cast(Any, (SimpleNamespace(name="first"), SimpleNamespace(name="second")))
    run = replace(run, evaluation_sets=sets, evaluator=evaluator_of(evaluate))
    assert train(run) == "change"
    assert observer.heard == []

    # Another process continues with the state of this process.
    progress = TrainingProgress()
    progress.load_values(run.progress.values())
    assert train(replace(run, progress=progress)) == "complete"
    assert observer.heard == [
        ("first", 3),
        ("second", 3),
        ("first", STEPS),
        ("second", STEPS),
    ]
    assert "evaluation_asked" not in progress.values()


def test_partial_measurements_of_an_interrupted_evaluation_are_part_of_the_state() -> None:
    """Only until it has ended: no later step has anything of it."""
    run, seen = make_run(Asking("evaluate"), []), list[int]()

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        seen.append(tally.done)
        tally.add([[0.5]], num_batches=1, weight=2)
        is_cut = len(seen) == 1
        return (
            None if is_cut else SimpleNamespace(loss=1.0, metrics={}, weight=1, seconds=0.0)
        )

    run = replace(run, evaluator=evaluator_of(evaluate))
    assert train(run) == "change"
    values = run.progress.values()
    assert values["step"] == 3 and values["tallies"]["heldOut"]["done"] == 1

    progress = TrainingProgress()
    progress.load_values(values)
    assert train(replace(run, progress=progress)) == "complete"
    # Continued after step 3, and started again after the last step.
    assert seen == [0, 1, 0]
    assert "tallies" not in progress.values()


def test_a_tally_that_is_too_large_for_a_checkpoint_is_omitted() -> None:
    progress = TrainingProgress(tallies={"heldOut": {"sums": ["1/3"] * MOST_TALLIES_BYTES}})
    assert "tallies" not in progress.values()


@pytest.mark.acceptance("8d-6b")
@pytest.mark.capability("O-47")
def test_each_set_is_evaluated_at_its_own_cadence_and_all_sets_at_the_end() -> None:
    done: list[tuple[str, int]] = []
    run = make_run(BaseObserver(), [])

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        done.append((one.name, run.progress.finished_steps))
        return SimpleNamespace(loss=1.0, metrics={}, weight=1, seconds=0.0)

    names = ("often", "seldom", "at the end")
    run = replace(
        run,
        evaluation_sets=cast(Any, tuple(SimpleNamespace(name=name) for name in names)),
        evaluator=evaluator_of(evaluate),
        limits=replace(run.limits, evaluate_sets_every={"often": 2, "seldom": 4}),
    )
    train(run)
    ended = [(name, STEPS) for name in names]
    assert done == [("often", 2), ("often", 4), ("seldom", 4), *ended]


@pytest.mark.acceptance("8d-3c")
@pytest.mark.capability("O-48")
def test_state_is_saved_once_before_each_evaluation_on_request() -> None:
    done: list[tuple[str, int]] = []
    run = make_run(BaseObserver(), done)
    limits = replace(
        run.limits, save_every=Rhythm(3), evaluate_every=3, saves_before_evaluation=True
    )
    train(replace(run, limits=limits))
    assert done == [("save", 3), ("evaluate", 3), ("save", STEPS), ("evaluate", STEPS)]


def test_a_requested_save_is_made_by_the_next_world_if_this_one_breaks_first() -> None:
    done: list[tuple[str, int]] = []
    run = make_run(Asking("save"), done)

    def breaks(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        raise PeerLostError("a rank is gone")

    # An evaluation is due after the very step for which the save was asked.
    limits = replace(run.limits, evaluate_every=3)
    with pytest.raises(PeerLostError):
        train(replace(run, limits=limits, evaluator=evaluator_of(breaks)))
    assert done == []

    # Another process continues with the state of this process; the save follows the evaluation.
    progress = TrainingProgress()
    progress.load_values(run.progress.values())
    assert train(replace(run, limits=limits, progress=progress)) == "complete"
    assert ("save", 3) in done
    assert "save_asked" not in progress.values()


def test_an_executed_request_is_not_part_of_a_later_state() -> None:
    run = make_run(Asking("save"), [])
    train(run)
    assert "save_asked" not in run.progress.values()


def test_the_checkpoint_of_a_requested_save_does_not_request_it_again() -> None:
    saved: list[dict[str, Any]] = []
    run = make_run(Asking("save"), [])

    def save(step: int, tensors: Any, *, extra: Any, **options: Any) -> None:
        saved.append(dict(run.progress.values()))

    checkpoints = SimpleNamespace(**{**vars(run.checkpoints), "save": save})
    train(replace(run, checkpoints=cast(Any, checkpoints)))
    assert [values["step"] for values in saved] == [3]
    assert "save_asked" not in saved[0]


def test_a_requested_save_that_could_not_start_is_still_requested() -> None:
    run = make_run(Asking("save"), [])

    def save(step: int, tensors: Any, **options: Any) -> None:
        raise PeerLostError("a rank is gone")

    checkpoints = SimpleNamespace(**{**vars(run.checkpoints), "save": save})
    with pytest.raises(PeerLostError):
        train(replace(run, checkpoints=cast(Any, checkpoints)))
    assert run.progress.values()["save_asked"] == 3


def test_ranks_that_have_just_joined_do_not_compare_their_states_twice() -> None:
    compared: list[int] = []
    run = make_run(BaseObserver(), [])
    limits = replace(run.limits, compare_every=2)
    run = replace(run, limits=limits, compare=compared.append)
    run.progress.finished_steps = 2
    assert train(run) == "complete"
    assert compared[0] == 4


def test_a_process_that_was_replaced_does_nothing_after_its_first_step() -> None:
    announced: list[int] = []
    run = make_run(BaseObserver(), [])

    class Fenced(Steps):
        def run(self, *args: Any, **options: Any) -> StepOutcome:
            outcome = super().run(*args, **options)
            flags = [False] * NUM_FLAGS
            flags[FLAG_FENCED] = True
            return replace(outcome, flags=tuple(flags))

    with pytest.raises(FencedError):
        train(
            replace(
                run, stepper=cast(Any, Fenced()), on_first_step=lambda: announced.append(1)
            )
        )
    assert announced == []


class Failing(BaseObserver):
    """Fails at each step, on one rank."""

    def __init__(self, is_failing: bool) -> None:
        self.is_failing = is_failing
        self.steps = 0

    def step_end(self, record: Any) -> None:
        self.steps += 1
        if self.is_failing:
            raise ValueError("no such thing here")


def test_an_observer_that_one_rank_disabled_is_disabled_on_all_ranks() -> None:
    here, there = Failing(False), Failing(True)
    lasting, other = Lasting([here]), Lasting([there])
    for _ in range(3):
        other.step_end(cast(Any, SimpleNamespace(step=1, generation=1)))
    assert other.switched_off == {"Failing"} and other.is_disagreeing

    # Another rank raises the flag, and names the observer in the exchange after the step.
    run = replace(make_run(lasting, []), lasting=lasting)

    class Meeting:
        rank, size, generation, is_main = 0, 2, 1, True

        def gather_json(self, value: Any) -> list[Any]:
            return [value, sorted(other.switched_off) if value == [] else value]

    class Flagged(Steps):
        def run(
            self, step: int, world: World, flags: Any, *, is_skipped: bool
        ) -> StepOutcome:
            raised = list(flags)
            raised[FLAG_OBSERVER_OFF] |= step == 4
            return super().run(step, world, tuple(raised), is_skipped=is_skipped)

    membership = SimpleNamespace(world=Meeting(), is_changing=lambda **options: False)
    run = replace(run, membership=cast(Any, membership), stepper=cast(Any, Flagged()))
    assert train(run) == "complete"
    assert lasting.switched_off == {"Failing"} and not lasting.is_disagreeing
    assert here.steps == 4
