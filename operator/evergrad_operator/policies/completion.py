"""Whether the run is complete: a node's exit code 0, the coordinator's word, or the PVC's record of an
earlier life."""

from dataclasses import replace

from evergrad_coordinator.causes import PodCause
from evergrad_operator.names import Phase, Reason
from evergrad_operator.policies.context import ReconcileContext
from evergrad_operator.policies.record import find_longer_horizon, find_own_record, has_recipe
from evergrad_operator.times import parse_time


def complete_if_recorded(context: ReconcileContext) -> ReconcileContext | None:
    """A run restored without its status, or created anew, that was complete before: it never trains again."""
    record, run = find_own_record(context), context.run
    if record is None or record.complete is None or record.path != run.volume_path:
        return None
    # Another recipe under the same name, or more steps of the same, is a conflict.
    if record.uid != run.uid and (
        not has_recipe(context, record) or find_longer_horizon(context, record)
    ):
        return None
    step = record.complete.get("step")
    after = f" after step {step}" if isinstance(step, int) else ""
    at = parse_time(record.complete.get("at")) or context.now
    # The record is written before the status, so that a crash between the two is seen as what it is.
    if record.uid == run.uid and context.memory.start_time is not None:
        # Ours, written a moment ago: only the status is still to follow.
        text = _describe(step if isinstance(step, int) else None)
        return _note_last_step(context).finished(Phase.COMPLETE, Reason.COMPLETE, text, at=at)
    text = (
        f"PersistentVolumeClaim {run.claim_name} says that this run was complete{after}; nothing "
        "is trained again"
    )
    if run.parsed.is_typed and run.parsed.is_whole and run.parsed.total_steps is None:
        # Its length is known to the trainer alone, which reads the data.
        text += ". Its horizon in epochs was not compared"
    if isinstance(step, int) and run.parsed.is_typed:
        training = replace(context.memory.training, step=step, total_steps=step)
        context = replace(context, memory=replace(context.memory, training=training))
    return _note_last_step(context).finished(
        Phase.COMPLETE, Reason.ALREADY_COMPLETE, text, at=at
    )


def complete_if_done(context: ReconcileContext) -> ReconcileContext | None:
    """The context with all steps done: over once no pod is at work any more, or the time for that has
    passed."""
    progress, memory = context.progress, context.memory
    done = [
        pod for pod in context.nodes if pod.end is not None and pod.end.cause == PodCause.DONE
    ]
    if (
        not done
        and memory.finishing_since is None
        and (progress is None or progress.phase != "Complete")
    ):
        return None
    since = context.now if memory.finishing_since is None else memory.finishing_since
    context = _note_last_step(replace(context, memory=replace(memory, finishing_since=since)))
    memory = context.memory
    at_work = [
        pod for pod in context.nodes if pod.is_running and not context.is_unreachable(pod)
    ]
    if at_work and context.now < since + context.config.finish_grace_seconds:
        return context
    text = _describe(memory.training.total_steps or memory.training.step)
    return context.finished(Phase.COMPLETE, Reason.COMPLETE, text)


def _note_last_step(context: ReconcileContext) -> ReconcileContext:
    """A typed run saves its last step before it says that it is done, and nobody may have asked its
    coordinator since."""
    training = context.memory.training
    if not context.run.parsed.is_typed or training.total_steps is None:
        return context
    training = replace(
        training, step=training.total_steps, checkpoint_step=training.total_steps
    )
    return replace(context, memory=replace(context.memory, training=training))


def _describe(steps: int | None) -> str:
    return "all steps are done" if steps is None else f"all {steps} steps are done"
