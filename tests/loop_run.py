"""A run whose steps and evaluations compute nothing, for tests of the training loop."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.training.components import LoopLimits, Rhythm, TrainingComponents
from evergrad_trainer.training.evaluation_counts import EvaluationCounts
from evergrad_trainer.training.exchange import NUM_FLAGS
from evergrad_trainer.training.progress import TrainingProgress
from evergrad_trainer.training.step_parts import StepOutcome

STEPS = 6


class Steps:
    """Steps that compute nothing. Observer requests of this rank are the requests of all ranks."""

    def run(
        self, step: int, world: World, flags: tuple[bool, ...], *, is_skipped: bool
    ) -> StepOutcome:
        assert len(flags) == NUM_FLAGS
        phases = dict.fromkeys(
            ("data", "forward_backward", "communication", "optimizer"), 0.0
        )
        return StepOutcome(step, 1.0, {}, 4, "0" * 16, 0.1, 1.0, flags, phases, 0.0)


def evaluator_of(run: Any) -> Any:
    """Return an evaluator that measures nothing."""

    def open_tally(one: Any, values: Any, *, stage: Any) -> EvaluationCounts:
        return EvaluationCounts.from_json(values, key=one.name, names=())

    return cast(Any, SimpleNamespace(run=run, open_tally=open_tally))


def make_run(observer: BaseObserver, done: list[tuple[str, int]]) -> TrainingComponents:
    progress = TrainingProgress()

    def save(step: int, tensors: Any, **options: Any) -> None:
        done.append(("save", step))

    def evaluate(one: Any, world: World, tally: EvaluationCounts, **options: Any) -> Any:
        done.append(("evaluate", progress.finished_steps))
        return SimpleNamespace(loss=1.0, metrics={}, weight=1, seconds=0.0)

    checkpoints = SimpleNamespace(
        save=save,
        mark_best=lambda step: done.append(("mark", step)),
        is_saving=False,
        poll=lambda: None,
        wait=lambda: None,
        is_fenced=lambda: False,
        published=None,
    )
    world = World(generation=1, rank=0, size=1, device=torch.device("cpu"))
    parts: dict[str, Any] = {
        "limits": LoopLimits(
            total_steps=STEPS, save_every=Rhythm(100), evaluate_every=None
        ),
        "membership": Membership(world),
        "stepper": Steps(),
        "stream": SimpleNamespace(entered_after=lambda step: None, stage=lambda step: None),
        "checkpoints": checkpoints,
        "state": SimpleNamespace(tensors=dict, values=dict),
        "evaluator": evaluator_of(evaluate),
        "evaluation_sets": (SimpleNamespace(name="heldOut"),),
        "best": None,
        "observers": observer,
        "directory": SimpleNamespace(stop_requested=lambda: False),
        "tokens_per_step": 4,
        "is_signalled": lambda: False,
        "compare": lambda step: None,
        "on_first_step": lambda: None,
        "finish_state": lambda outcome, entered: None,
        "snapshots": None,
    }
    return cast(Any, TrainingComponents)(**parts, progress=progress)  # type: ignore[no-any-return]
