"""Calls of the task during training: its loss, its evaluators, and its hooks at the end of a step."""

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
"""Finishes the state after a step. The stage is the one that the next step enters, if it enters one."""


def build_loss(opened: Opened, modules: Modules, *, should_compile: bool) -> LossOf:
    """Return the task's loss over its modules; with ``should_compile``, one graph per stage."""
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
    """The training stream. Errors in a task's own source name the file and line of the task's code."""

    stream: TrainingStream
    code: Code

    def slot(self, step: int, slot: int) -> Batch:
        """Return the micro-batch of a slot of a step. The prefetcher's thread calls this, too."""
        with self.code.guarding("read of its source"):
            return self.stream.slot(step, slot)


def _compile_by_stage(opened: Opened, modules: Modules) -> LossOf:
    """Compile one graph per stage: a graph treats everything in a stage except tensors as constant."""

    def compile_for(stage: Stage) -> _Graph:
        # Pass plain values in and out: a graph would inspect a class of this package at every call.
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
    """Raise if the loss lacks a declared part or has another one: all ranks fill the same positions of a
    vector."""
    # Check this in each slot, because a part that is missing in one slot would shift the other positions.
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
    """Let the task prepare its modules for the first stage, starting from their initial values.

    ``cut``: modules of which this rank holds only a part.
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
    """Build the calls of the task at the end of a step: after an update, and before a new stage.

    ``frozen``: hashes of the parts of frozen modules that this rank holds, as built. ``cut``: modules of
    which this rank holds only a part. ``average``: updated with the weights after each update.
    """
    task, code = opened.task, opened.code

    @torch.no_grad()
    def finish(outcome: StepOutcome, entered: Stage | None) -> None:
        # The ranks' generators differ after their last slots; seed them equally, because the kept state is
        # shared.
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
            # Check this only here, not in each step, because it reads all frozen modules. A joining rank
            # builds them again, and would otherwise continue with different ones.
            require_unchanged(modules, frozen, code=code)

    return finish


def _free(cut: Sequence[nn.Module]) -> None:
    """Reshard modules that the task's passes have left gathered. No backward pass follows that would do it,
    and whole weights are neither what was hashed nor what is saved."""
    if cut:
        reshard(*cut)


def build_measures(opened: Opened, modules: Modules, loss_of: LossOf) -> dict[str, Measure]:
    """Return how to measure each of the task's evaluation sets, by name."""

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
    """Return the function that computes the metrics of an evaluator from the means of its parts. Its result
    must have exactly the declared metrics."""

    def summarize(means: Mapping[str, float], stage: Stage) -> Mapping[str, float]:
        found: Mapping[str, float] = means
        if evaluator.summarize is not None:
            with code.guarding(f"summarize of its evaluator {name}"):
                found = evaluator.summarize(means)
        # Observers and the selection of the best checkpoint rely on the declared names.
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
