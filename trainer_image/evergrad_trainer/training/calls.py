"""The calls of a task while it trains: its loss, its evaluators, and what it does when a step is finished."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.recipes.opening import Opened
from evergrad_trainer.recipes.own import Code
from evergrad_trainer.task import Loss, Modules, Tensors
from evergrad_trainer.training.evaluation import Measure
from evergrad_trainer.training.modules import hash_frozen
from evergrad_trainer.training.step import LossOf, StepOutcome

Finish = Callable[[StepOutcome, Stage | None], None]
"""Finishes the state after a step; the stage is the one that the next step enters, if it enters one."""


def build_loss(opened: Opened, modules: Modules, *, should_compile: bool) -> LossOf:
    """The task's loss over its modules; compiled, one graph a stage, where that was asked for."""
    task, code = opened.task, opened.code
    compute = _compile_by_stage(opened, modules) if should_compile else None

    def loss_of(tensors: Tensors, stage: Stage) -> Loss:
        with code.guarding("loss"):
            loss = (
                task.loss(modules, tensors, stage)
                if compute is None
                else compute(tensors, stage)
            )
        _check_parts(loss, task.metrics, code)
        return loss

    return loss_of


@dataclass(frozen=True)
class GuardedStream:
    """The training stream; an error of a task's own source names file and line of its code."""

    stream: TrainingStream
    code: Code

    def slot(self, step: int, slot: int) -> Batch:
        """The micro-batch of a slot of a step. Called in the thread of the prefetcher, too."""
        with self.code.guarding("read of its source"):
            return self.stream.slot(step, slot)


def _compile_by_stage(opened: Opened, modules: Modules) -> LossOf:
    def compile_for(
        stage: Stage,
    ) -> Callable[[Tensors], tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        def compute(tensors: Tensors) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = opened.task.loss(modules, tensors, stage)
            return loss.total, dict(loss.parts)

        return torch.compile(compute, dynamic=False)

    compiled = [(stage, compile_for(stage)) for stage in opened.data.train.stages]

    def loss_of(tensors: Tensors, stage: Stage) -> Loss:
        return Loss(*next(compute for own, compute in compiled if own is stage)(tensors))

    return loss_of


def _check_parts(loss: Loss, metrics: Mapping[str, str], code: Code) -> None:
    """Every rank sends the same places of one vector, also a rank that has computed nothing."""
    # Looked at in each slot: a part that is missing in one of them would shift the others' places.
    if loss.parts.keys() != metrics.keys():
        what = f"the loss has the parts {', '.join(loss.parts) or '(none)'}"
        why = f"the task's metrics are {', '.join(metrics) or '(none)'}"
        remedy = "Give each part of the loss a line in metrics, and each of metrics a part"
        raise code.explain(Problem("spec.training.recipe", what, why, remedy))


def enter_first(opened: Opened, modules: Modules, *, seed: int) -> None:
    """Let the task prepare its modules for the first stage, from the values that they begin with."""
    seed_generators(seed, 0, 0, Purpose.FINISHED_STEP)
    with torch.no_grad(), opened.code.guarding("enter"):
        opened.task.enter(modules, opened.data.train.stages[0])


def build_finish(
    opened: Opened, modules: Modules, *, seed: int, frozen: Mapping[str, str]
) -> Finish:
    """What the task does with its modules when a step is finished: after an update, and before
    another stage.

    ``frozen``: hashes of the frozen modules as they were built.
    """
    task, code = opened.task, opened.code

    @torch.no_grad()
    def finish(outcome: StepOutcome, entered: Stage | None) -> None:
        # The last slot that this rank has computed left its own random numbers; what is kept is everybody's.
        seed_generators(seed, outcome.step, 0, Purpose.FINISHED_STEP)
        if outcome.skipped is None:
            with code.guarding("after_update"):
                task.after_update(modules, {"loss": outcome.loss, **outcome.metrics})
            code.note_trained()
        if entered is not None:
            with code.guarding("enter"):
                task.enter(modules, entered)
            # Looked at here and not at each step, since it reads all of them: a newcomer builds them again,
            # and would go on with others.
            _check_frozen(frozen, hash_frozen(modules), code)

    return finish


def _check_frozen(before: Mapping[str, str], now: Mapping[str, str], code: Code) -> None:
    changed = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    if changed:
        what = f"the frozen modules {', '.join(changed)} have changed since they were built"
        why = "they are not saved, so that a newcomer or a resumed run would go on with others"
        remedy = "Keep what changes as tensors in Modules.kept"
        raise code.explain(Problem("spec.training.recipe", what, why, remedy))


def build_measures(opened: Opened, modules: Modules, loss_of: LossOf) -> dict[str, Measure]:
    """What is measured on each of the task's evaluation sets, by its name."""

    def build(name: str) -> Measure:
        evaluator = opened.evaluators[name]
        metrics = opened.task.metrics if evaluator.metrics is None else evaluator.metrics
        measure = evaluator.measure
        if measure is None:
            return Measure(loss_of, tuple(metrics))

        def measured(tensors: Tensors, stage: Stage) -> Loss:
            with opened.code.guarding(f"its evaluator {name}"):
                loss = measure(modules, tensors, stage)
            _check_parts(loss, metrics, opened.code)
            return loss

        return Measure(measured, tuple(metrics))

    return {name: build(name) for name in opened.evaluators}
