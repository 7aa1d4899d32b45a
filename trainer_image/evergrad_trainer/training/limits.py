"""Derives from the file when the loop evaluates, saves and stops, and which checkpoint is the best."""

from evergrad_manifest.training import SaveEvery, Training
from evergrad_trainer.training.components import BestCheckpoint, LoopLimits, Rhythm


def build_limits(
    training: Training,
    *,
    total_steps: int,
    stop_after_steps: int | None,
    anchors: frozenset[int] = frozenset(),
) -> LoopLimits:
    """Return when the loop evaluates, saves and stops.

    ``anchors``: steps whose checkpoints later steps need.
    """
    evaluation, saves = training.evaluation, training.checkpoint
    return LoopLimits(
        total_steps=total_steps,
        save_every=_build_rhythm(saves.every, training),
        keep_every=_build_rhythm(saves.keep_every, training),
        save_seconds=saves.every.seconds,
        compare_every=training.runtime.compare_replicas_every or None,
        evaluate_every=evaluation.every.steps if evaluation.every else None,
        evaluate_sets_every={
            one.name: one.every.steps for one in evaluation.sets if one.every is not None
        },
        evaluate_at_start=evaluation.at_start,
        saves_before_evaluation=evaluation.save_first,
        after_step=training.stop.after_step,
        stop_after_steps=stop_after_steps,
        non_finite_in_a_row=training.on_non_finite.skip,
        skip_steps=frozenset(training.skip_steps),
        anchors=anchors,
    )


def _build_rhythm(every: SaveEvery | None, training: Training) -> Rhythm | None:
    if every is None or every.seconds is not None:
        return None
    if every.tokens is None:
        return Rhythm(every.steps or 1)
    return Rhythm(
        every.tokens, training.batching.global_batch_size * training.sample_tokens
    )


def build_best(training: Training) -> BestCheckpoint | None:
    """Return the rule that selects the best checkpoint; None unless the file requests one."""
    best = training.checkpoint.best
    return BestCheckpoint(metric=best.metric, mode=best.mode) if best else None
