"""Decides what is due after the newest finished step. The functions are pure, and depend only on counts and
flags that all ranks have agreed on, so that each rank gets the same result."""

from dataclasses import replace

from evergrad_trainer.base.records import StopReason
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.distributed.world import World
from evergrad_trainer.training.components import LoopLimits, TrainingComponents
from evergrad_trainer.training.exchange import (
    FLAG_CHANGE,
    FLAG_SIGNAL,
    FLAG_STOP,
    FLAG_STOP_FILE,
)
from evergrad_trainer.training.progress import TrainingProgress


def agree_limits(limits: LoopLimits, world: World) -> LoopLimits:
    """Return limits that are the same on all ranks.

    The ranks' own limits may differ, because some processes may have read the file before it was edited.
    """
    own = [limits.non_finite_in_a_row, sorted(limits.skip_steps), limits.compare_every]
    # Collective, once per world, before its first step.
    rows = world.gather_json(own)

    in_a_row = max(number for number, _, _ in rows)
    skip_steps = frozenset(step for _, steps, _ in rows for step in steps)
    # Use the value of rank 0: a comparison that only some ranks make would wait forever for the others.
    compare_every = rows[0][2]
    return replace(
        limits,
        non_finite_in_a_row=in_a_row,
        skip_steps=skip_steps,
        compare_every=compare_every,
    )


def find_stop_reason(
    limits: LoopLimits, progress: TrainingProgress, flags: tuple[bool, ...]
) -> StopReason | None:
    """Return why all ranks leave the loop, or None if they continue."""
    if progress.finished_steps >= limits.total_steps:
        return "complete"
    if flags[FLAG_SIGNAL]:
        return "signal"
    if flags[FLAG_STOP_FILE]:
        return "stop_file"
    if limits.after_step is not None and progress.finished_steps >= limits.after_step:
        return "after_step"
    if (
        limits.stop_after_steps is not None
        and progress.steps_here >= limits.stop_after_steps
    ):
        return "stop_after_steps"
    if flags[FLAG_STOP]:
        return "observer"
    if flags[FLAG_CHANGE]:
        return "change"
    return None


def is_due(step: int, every: int | None) -> bool:
    """Return whether ``step`` is a multiple of ``every``; None means never."""
    return every is not None and step % every == 0


def due_sets(run: TrainingComponents) -> tuple[EvaluationSet, ...]:
    """Return the sets to evaluate before the first step or after the newest step.

    An evaluation that was interrupted by a stop or a lost peer remains due until it is complete.
    """
    progress, limits = run.progress, run.limits
    step = progress.finished_steps
    if progress.evaluated_step >= step:
        return ()
    if step == 0:
        return run.evaluation_sets if limits.evaluate_at_start else ()
    if step in (limits.total_steps, progress.evaluation_asked, *limits.anchors):
        return run.evaluation_sets
    own = limits.evaluate_sets_every
    return tuple(
        one
        for one in run.evaluation_sets
        if is_due(step, own.get(one.name, limits.evaluate_every))
    )


def is_save_due(run: TrainingComponents) -> bool:
    """Return whether a save is due. The end of the run and the best checkpoint have their own rules."""
    progress = run.progress
    if progress.save_asked == progress.finished_steps:
        return True
    if progress.is_save_lost:
        return True
    rhythms = (run.limits.save_every, run.limits.keep_every)
    return any(one is not None and one.is_due(progress.finished_steps) for one in rhythms)
