"""The calls of a task while it trains: its loss, its evaluators, and what it does when a step is finished."""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.models.parallel import reshard
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.optim.average import Average
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.task import Evaluator, Loss, Modules, Tensors
from evergrad_trainer.training.evaluation import Measure
from evergrad_trainer.training.frozen import require_unchanged
from evergrad_trainer.training.step_parts import LossOf, StepOutcome

_Sums = tuple[torch.Tensor, dict[str, torch.Tensor]]
_Graph = Callable[[Tensors], _Sums]
Finish = Callable[[StepOutcome, Stage | None], None]
"""Finishes the state after a step; the stage is the one that the next step enters, if it enters one."""


def build_loss(opened: Opened, modules: Modules, *, should_compile: bool) -> LossOf:
    """The task's loss over its modules; compiled, one graph a stage, where that was asked for."""
    task, code = opened.task, opened.code
    compute: LossOf = functools.partial(task.loss, modules)
    if should_compile:
        compute = _compile_by_stage(opened, modules)

    def loss_of(tensors: Tensors, stage: Stage) -> Loss:
        with code.guarding("loss"):
            loss = compute(tensors, stage)
        _check_parts(loss, task.metrics, stage, code)
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
    """One graph a stage: a graph takes for constant whatever else a stage holds than tensors."""

    def compile_for(stage: Stage) -> _Graph:
        # Plain values in and out: a class of this package in a graph would be looked into at every call.
        def compute(tensors: Tensors) -> _Sums:
            loss = opened.task.loss(modules, tensors, stage)
            return loss.total, dict(loss.parts)

        return torch.compile(compute, dynamic=False)

    compiled = [(stage, compile_for(stage)) for stage in opened.data.train.stages]

    def loss_of(tensors: Tensors, stage: Stage) -> Loss:
        compute = next(graph for own, graph in compiled if own is stage)
        total, parts = compute(tensors)
        return Loss(total, parts)

    return loss_of


def _check_parts(loss: Loss, parts: Collection[str], stage: Stage, code: Code) -> None:
    """Every rank sends the same places of one vector, also a rank that has computed nothing."""
    # Looked at in each slot: a part that is missing in one of them would shift the others' places.
    names = [name for name in parts if name not in stage.without]
    if loss.parts.keys() == set(names):
        return
    given = ", ".join(loss.parts) or "(none)"
    named = ", ".join(names) or "(none)"
    remedy = "Give each part of the loss a line in metrics, and each of metrics a part"
    raise code.explain(
        Problem(
            "spec.training.recipe",
            f"the loss has the parts {given}",
            f"the task's metrics are {named}",
            remedy,
        )
    )


def enter_first(
    opened: Opened, modules: Modules, *, seed: int, cut: Sequence[nn.Module] = ()
) -> None:
    """Let the task prepare its modules for the first stage, from the values that they begin with.

    ``cut``: those of which this rank holds a part.
    """
    seed_generators(seed, 0, 0, Purpose.FINISHED_STEP)
    with torch.no_grad(), opened.code.guarding("enter"):
        opened.task.enter(modules, opened.data.train.stages[0])
    _free(cut)


def build_finish(
    opened: Opened,
    modules: Modules,
    *,
    seed: int,
    frozen: Mapping[str, str],
    cut: Sequence[nn.Module] = (),
    average: Average | None = None,
) -> Finish:
    """Calls of the task on its modules when a step is finished: after an update, and before
    another stage.

    ``frozen``: hashes of what this rank holds of the frozen modules, as they were built. ``cut``: the modules
    of which it holds a part. ``average``: takes in the weights of each update.
    """
    task, code = opened.task, opened.code

    @torch.no_grad()
    def finish(outcome: StepOutcome, entered: Stage | None) -> None:
        # The last slot that this rank has computed left its own random numbers; what is kept is everybody's.
        seed_generators(seed, outcome.step, 0, Purpose.FINISHED_STEP)
        if outcome.skipped is None:
            if average is not None:
                average.update()
            metrics = {"loss": outcome.loss, **outcome.metrics}
            with code.guarding("after_update"):
                task.after_update(modules, metrics)
            _free(cut)
            code.note_trained()
        if entered is not None:
            with code.guarding("enter"):
                task.enter(modules, entered)
            _free(cut)
            # Looked at here and not at each step, since it reads all of them: a newcomer builds them again,
            # and would continue with others.
            require_unchanged(modules, frozen, code=code)

    return finish


def _free(cut: Sequence[nn.Module]) -> None:
    """Free what the task's passes have left gathered: no backward pass follows that would do so, and whole
    weights are neither those that were hashed nor those that are saved."""
    if cut:
        reshard(*cut)


def build_measures(opened: Opened, modules: Modules, loss_of: LossOf) -> dict[str, Measure]:
    """The measurement of each of the task's evaluation sets, by its name."""

    def build(name: str) -> Measure:
        evaluator = opened.evaluators[name]
        measure = evaluator.measure
        metrics = evaluator.metrics
        if metrics is None:
            metrics = opened.task.metrics
        parts = tuple(metrics) if evaluator.parts is None else tuple(evaluator.parts)
        summarize = _build_summary(name, evaluator, tuple(metrics), opened.code)
        if measure is None:
            return Measure(loss_of, parts, summarize)

        def measured(tensors: Tensors, stage: Stage) -> Loss:
            with opened.code.guarding(f"its evaluator {name}"):
                loss = measure(modules, tensors, stage)
            _check_parts(loss, parts, stage, opened.code)
            return loss

        return Measure(measured, parts, summarize, is_own=True)

    return {name: build(name) for name in opened.evaluators}


def _build_summary(
    name: str, evaluator: Evaluator, metrics: Sequence[str], code: Code
) -> Callable[[Mapping[str, float], Stage], Mapping[str, float]]:
    """How the metrics of an evaluator are made of the means of its parts: each that it declares, and no
    other."""

    def summarize(means: Mapping[str, float], stage: Stage) -> Mapping[str, float]:
        found: Mapping[str, float] = means
        if evaluator.summarize is not None:
            with code.guarding(f"summarize of its evaluator {name}"):
                found = evaluator.summarize(means)
        # Observers and the choice of the best checkpoint rely on the names that were declared.
        wanted = [metric for metric in metrics if metric not in stage.without]
        try:
            numbers = {metric: float(value) for metric, value in dict(found).items()}
        except (TypeError, ValueError, RuntimeError) as error:
            given = (
                f"what is no number under each name ({' '.join(str(error).split())[:200]})"
            )
        else:
            if numbers.keys() == set(wanted):
                return numbers
            given = ", ".join(map(str, numbers)) or "(none)"
        raise code.explain(
            Problem(
                "spec.training.recipe",
                f"the metrics of evaluator {name} are {', '.join(wanted) or '(none)'}",
                f"it gives {given}",
                "Give each of its metrics a number, and each number a line in metrics",
            )
        )

    return summarize
