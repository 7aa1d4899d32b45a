"""Decides whether the run is complete: by a node's exit code 0, by its coordinator, or by the record on the
PVC."""

from dataclasses import replace

from evergrad_common.causes import PodCause
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.raw import get_natural
from evergrad_operator.core.objects.times import parse_time
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.record import (
    find_longer_horizon,
    find_own_record,
    has_recipe,
)


def complete_if_recorded(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run complete if the record on the PVC shows that; None otherwise.

    Such a run was restored without its status, or created again. It never trains again.
    """
    record, run = find_own_record(context), context.run
    if record is None or record.complete is None or record.path != run.volume_path:
        return None
    # Another recipe with the same name, or the same recipe with more steps, is a conflict.
    is_ours = record.uid == run.uid
    if not is_ours and not has_recipe(context, record):
        return None
    if not is_ours and find_longer_horizon(context, record):
        return None
    step = get_natural(record.complete, "step")
    at = parse_time(record.complete.get("at")) or context.now

    # The record is written before the status. If the operator stopped in between, the run's own record exists
    # and only the status is missing.
    if is_ours and context.memory.start_time is not None:
        text = _describe(step)
        return _note_last_step(context).finished(
            Phase.COMPLETE,
            Reason.COMPLETE,
            text,
            at=at,
        )

    after = f" after step {step}" if step is not None else ""
    text = (
        f"PersistentVolumeClaim {run.claim_name} records that this run was complete{after}; nothing "
        "is trained again"
    )
    if run.parsed.is_typed and run.parsed.is_whole and run.parsed.total_steps is None:
        # Only the trainer can compute the number of steps, because it reads the data.
        text += ". Its horizon in epochs was not compared"
    if step is not None and run.parsed.is_typed:
        training = replace(
            context.memory.training,
            step=step,
            total_steps=step,
        )
        context = replace(context, memory=replace(context.memory, training=training))
    over = _note_last_step(context)
    return over.finished(
        Phase.COMPLETE,
        Reason.ALREADY_COMPLETE,
        text,
        at=at,
    )


def complete_if_done(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with all steps done; None if steps remain.

    The run is over after no pod runs any more, or after ``finish_grace_seconds``.
    """
    progress, memory = context.progress, context.memory
    # Ignore pods from before a restart, because they do not show the steps of the restarted run.
    has_ended_well = any(
        pod.end is not None
        and pod.end.cause == PodCause.DONE
        and pod.restart == memory.restart
        for pod in context.nodes
    )
    is_complete = progress is not None and progress.phase == "Complete"
    if not has_ended_well and not is_complete and memory.finishing_since is None:
        return None

    # The coordinator reports the end while rank 0 still writes the report, so give running pods time to
    # finish.
    since = context.now if memory.finishing_since is None else memory.finishing_since
    context = _note_last_step(
        replace(context, memory=replace(memory, finishing_since=since))
    )
    memory = context.memory
    at_work = [
        pod for pod in context.nodes if pod.is_running and not context.is_unreachable(pod)
    ]
    if at_work and context.now < since + context.config.finish_grace_seconds:
        return context
    text = _describe(memory.training.total_steps or memory.training.step)
    return context.finished(Phase.COMPLETE, Reason.COMPLETE, text)


def _note_last_step(context: ReconcileContext) -> ReconcileContext:
    """Return the context with the last step of a typed run recorded as reached and saved.

    A typed run saves its last step before it ends, and the coordinator may not have been polled since.
    """
    training = context.memory.training
    if not context.run.parsed.is_typed or training.total_steps is None:
        return context
    training = replace(
        training,
        step=training.total_steps,
        checkpoint_step=training.total_steps,
    )
    return replace(context, memory=replace(context.memory, training=training))


def _describe(steps: int | None) -> str:
    return "all steps are done" if steps is None else f"all {steps} steps are done"
