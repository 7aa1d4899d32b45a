"""Decides on runs that are over, suspended, stopped on request or being restarted."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from evergrad_operator.core.decision import Action, Decision, PodDeletion
from evergrad_operator.core.objects.installation import DELETES_RUN, NO_DELETION
from evergrad_operator.core.objects.kinds import POD_GROUP, POD_GROUPS
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.times import format_duration, format_time
from evergrad_operator.core.observe.memory import RecordedFinish, begin_anew
from evergrad_operator.core.observe.observe import VolumeRecord
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.evaluation_ends import is_evaluation_due
from evergrad_operator.core.policies.record import TRAIN_ON, find_own_record, plan_record

_AT_ONCE: Final = frozenset(
    {
        Reason.DEADLINE_EXCEEDED,
        Reason.OUTPUT_CONFLICT,
        Reason.ALREADY_COMPLETE,
    }
)
_NOT_ASKED: Final = frozenset({"AllNodesLeft", "Signal"})
_PREPARING_LEAVES: Final = (
    "the pod that prepares the data leaves; what it has finished is kept"
)
_EVALUATION_LEAVES: Final = "the pod that evaluates leaves; what it has measured is kept"
_FIRST_WORDS_SECONDS: Final = 30.0
"""Time within which a new coordinator should answer for the first time. A suspended run keeps it until
then."""
_DELETION_RETRY_SECONDS: Final = 10.0
"""Time until the next pass if the deletion of a run failed, for example because the run was changed
meanwhile."""
_NOTED_SECONDS: Final = 1.0
"""Time until the next pass if the end of a run was not in the status yet."""


def remove(pods: Iterable[PodState]) -> tuple[PodDeletion, ...]:
    """Return deletions of the pods that are not being deleted already, the highest index first."""
    chosen = sorted(
        (pod for pod in pods if not pod.is_deleting),
        key=lambda pod: (pod.index, pod.attempt),
        reverse=True,
    )
    return tuple(PodDeletion(pod.name, pod.uid) for pod in chosen)


def earliest(*seconds: float | None) -> float | None:
    """Return the smallest number of seconds, at least 1.0; None if all arguments are None."""
    return min((max(1.0, one) for one in seconds if one is not None), default=None)


# ---- over --------------------------------------------------------------------------------------------------


def fail_at_deadline(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run failed if the run's deadline has passed; None otherwise."""
    left = seconds_to_deadline(context)
    if left is None or left > 0:
        return None
    limit = context.run.spec.active_deadline_seconds or 0
    text = f"the run was not complete {format_duration(limit)} after its start (spec.activeDeadlineSeconds). "
    remedy = (
        "State is saved as the pods leave; raise the limit and set spec.restartNonce to a new text "
        "to continue."
    )
    return context.finished(
        Phase.FAILED,
        Reason.DEADLINE_EXCEEDED,
        text + remedy,
    )


def seconds_to_deadline(context: ReconcileContext) -> float | None:
    """Return the seconds until the run's deadline; None if the run has no limit or has not started.

    The value is negative after the deadline. The clock starts again after a suspension.
    """
    limit, start = context.run.spec.active_deadline_seconds, context.memory.start_time
    return None if limit is None or start is None else start + limit - context.now


def conclude(context: ReconcileContext) -> Decision:
    """Return the decision for a run that is over.

    Running pods may end on their own, then the coordinator is deleted. Ended pods stay for their logs until
    ``ttlSecondsAfterFinished`` has passed; then all children are deleted, and with ``ttlDeletes: Run`` the
    run.

    Raises ValueError if the run is not over.
    """
    finish, config, now = context.memory.finish, context.config, context.now
    if finish is None:
        raise ValueError("only a run that is over is concluded")
    ttl = context.run.spec.ttl_seconds_after_finished
    # Keep the pods that show the end until the status contains it. If the write of the status were lost after
    # the pods were deleted, the run would begin again.
    is_noted = context.observation.status.finish is not None
    # Delete all children only after the waiting checkpoints have been evaluated. Only the record on the
    # volume remains.
    is_evaluated = (
        not is_evaluation_due(context.memory, context.observation)
        and not context.evaluating
    )
    # A run that is complete when it is created (see ALREADY_COMPLETE) stays for the whole TTL after its
    # creation.
    expiry = None if ttl is None else max(finish.at, context.run.created_at) + ttl
    if expiry is not None and now >= expiry and is_evaluated and is_noted:
        return _clean(context, finish)

    # Give the pods of a failed run time to write their last messages, unless the reason requires an immediate
    # end.
    grace = (
        finish.at + config.fail_grace_seconds if finish.phase == Phase.FAILED else finish.at
    )
    is_due = finish.reason in _AT_ONCE or now >= grace
    chosen = [pod for pod in context.live if is_due or not pod.is_running]
    chosen += context.preparing
    at_work = [pod for pod in (*context.live, *context.leaving) if pod.is_running]
    # Delete the coordinator last, because running pods ask it whether they may end.
    if not at_work and is_noted:
        chosen += [pod for pod in context.observation.coordinators if pod.is_live]
    return Decision(
        Action.FINISH,
        finish.phase,
        finish.reason,
        _said(context),
        context.memory,
        pods_to_delete=remove(chosen),
        record=_completed_record(context),
        requeue_after=earliest(
            None if is_due or not at_work else grace - now,
            None if is_noted or at_work else _NOTED_SECONDS,
            context.seconds_to_unreachable,
            # After that time, the end of an evaluation triggers the next pass.
            None if expiry is None or now >= expiry else expiry - now,
        ),
    )


def _clean(context: ReconcileContext, finish: RecordedFinish) -> Decision:
    """Return the last decision about a run, which deletes its children, and the run itself if it requests
    that."""
    seen, record = context.observation, _completed_record(context)
    wants_deletion = context.run.spec.ttl_deletes == DELETES_RUN
    is_allowed = wants_deletion and context.config.allow_run_deletion
    # Write the record to the volume before deleting the run. Otherwise the same file, if applied again, would
    # train again.
    deletes_run = is_allowed and record is None
    everything = (*context.nodes, *seen.coordinators, *seen.preparations, *seen.evaluations)
    return Decision(
        Action.CLEAN,
        finish.phase,
        finish.reason,
        _said(context),
        context.memory,
        # If the run is deleted, the garbage collector deletes its pods through their owner references.
        pods_to_delete=() if deletes_run else remove(everything),
        record=record,
        deletes_run=deletes_run,
        requeue_after=_DELETION_RETRY_SECONDS if is_allowed else None,
    )


def _said(context: ReconcileContext) -> str:
    """Return the message of the run's end, with the later edits that have no effect."""
    finish, nonce = context.memory.finish, context.run.spec.restart_nonce
    message = finish.message if finish else ""
    # The webhook refuses ttlDeletes: Run without the right to delete runs. However, the webhook may have been
    # down, or the right may have been revoked since.
    if (
        context.run.spec.ttl_deletes == DELETES_RUN
        and not context.config.allow_run_deletion
    ):
        message += f"; the run will not be deleted: {NO_DELETION}"
    if finish is None or finish.phase != Phase.COMPLETE:
        return message

    if nonce != context.memory.restart_nonce:
        message += (
            "; spec.restartNonce has no effect on a complete run: create a new TrainingRun"
        )
    done, wanted = context.memory.training.total_steps, context.run.parsed.total_steps
    if done and wanted and wanted > done:
        message += (
            f"; the horizon of {wanted} steps has no effect on a complete run. {TRAIN_ON}"
        )
    return message


def _completed_record(context: ReconcileContext) -> VolumeRecord | None:
    """Return the record of a complete run for the PVC; None if there is nothing to write.

    The record survives the loss of the run's status.
    """
    finish, own, memory = context.memory.finish, find_own_record(context), context.memory
    if finish is None or finish.phase != Phase.COMPLETE:
        return None
    # Write the record once, and not at all if the run is complete because of an existing record.
    is_written = own is not None and own.complete is not None and own.uid == context.run.uid
    if finish.reason == Reason.ALREADY_COMPLETE or is_written:
        return None
    if context.observation.claim is None:
        return None

    # Epochs never decrease, even in the record of a run that is over.
    epoch = max(memory.coordinator.attempt, own.epoch if own else -1)
    complete: dict[str, object] = {"at": format_time(finish.at)}
    if memory.training.step is not None:
        complete["step"] = memory.training.total_steps or memory.training.step
    return replace(plan_record(context, epoch), complete=complete)


# ---- paused ------------------------------------------------------------------------------------------------


def stop_if_asked(context: ReconcileContext) -> Decision | None:
    """Return the decision for a run that is suspended or stopped on request; None for other runs.

    The nodes save and leave, then the coordinator is deleted.
    """
    progress, memory = context.progress, context.memory
    if context.run.spec.suspend:
        # Resuming by hand also clears a stop that the recipe requested.
        memory = replace(memory, stop_reason="")
        return _drain(replace(context, memory=memory), Reason.SUSPENDED)

    # If all nodes left or the coordinator received a signal, there was no request to stop the run.
    has_stopped = (
        progress is not None
        and progress.phase == "Stopped"
        and progress.reason not in _NOT_ASKED
    )
    if progress is not None and has_stopped and not memory.is_stopped:
        is_non_finite = progress.reason == Reason.NON_FINITE
        stop_reason = Reason.NON_FINITE if is_non_finite else Reason.STOPPED
        memory = replace(memory, stop_reason=stop_reason)
    if not memory.is_stopped:
        return None
    return _drain(replace(context, memory=memory), Reason(memory.stop_reason))


def _drain(context: ReconcileContext, reason: Reason) -> Decision:
    """Return the decision by which all nodes leave together, so that the last holder of the state saves it.

    The coordinator serves until the nodes have left.
    """
    memory, coordinators = context.memory, context.observation.coordinators
    preparing, ended = context.preparing, context.observation.preparations
    beside = (*preparing, *context.evaluating)
    working = (*context.live, *context.leaving, *beside)
    live_coordinators = [pod for pod in coordinators if pod.is_live]
    is_stale = _is_status_stale(context, live_coordinators)
    # Only the coordinator shows a stop on request, so delete no pod before the run's status contains the
    # stop.
    is_noted = context.run.spec.suspend or context.observation.status.is_stopped

    # Delete the nodes first, then the coordinator, because nodes report their last save to it.
    if working or live_coordinators:
        chosen: tuple[PodState, ...] = ()
        text = "the coordinator leaves"
        if working:
            chosen, nodes = (*context.live, *beside), len(working) - len(beside)
            waited_for = _PREPARING_LEAVES if preparing else _EVALUATION_LEAVES
            text = f"{nodes} nodes save and leave" if nodes else waited_for
        elif not is_stale:
            chosen = (*live_coordinators, *context.nodes)
        return Decision(
            Action.STOP,
            Phase.SUSPENDING,
            Reason.SUSPENDING,
            text,
            memory,
            pods_to_delete=remove(chosen) if is_noted else (),
            requeue_after=earliest(
                context.seconds_to_unreachable,
                None if working or not is_stale else 1.0,
                None if is_noted else _NOTED_SECONDS,
            ),
        )

    return Decision(
        Action.STOP,
        Phase.SUSPENDED,
        reason,
        _describe_pause(context, reason),
        begin_anew(memory),
        pods_to_delete=remove((*context.nodes, *coordinators, *ended)),
        # Only a person can decide whether the step or the recipe caused a loss that is not finite.
        is_blocked=reason == Reason.NON_FINITE,
    )


def _is_status_stale(context: ReconcileContext, live_coordinators: list[PodState]) -> bool:
    """Return whether the newest status of the coordinator may be older than the last save of its nodes.

    The last node reports its save to the coordinator, which may not have been polled since that report.
    """
    # A new coordinator may not have been polled since its nodes joined.
    is_young = context.memory.training.step is None and any(
        context.now - pod.created_at < _FIRST_WORDS_SECONDS for pod in live_coordinators
    )
    # An operator that has just started has no status of the coordinator yet, so wait for one in a suspension.
    # A stop on request needs no wait, because the coordinator's status has reported it.
    is_unheard = is_young or (
        context.run.spec.suspend
        and context.progress is None
        and context.observation.unreachable is None
        and any(pod.is_running and pod.ip for pod in live_coordinators)
    )
    return is_unheard or (context.progress is not None and context.progress.connected > 0)


def _describe_pause(context: ReconcileContext, reason: Reason) -> str:
    """Return a message about the saved state and how to resume the run."""
    step = context.memory.training.checkpoint_step
    if reason == Reason.NON_FINITE:
        # The checkpoint has the state before the step that is not finite, so that step follows the
        # checkpoint's.
        which, saved = "a step", ""
        if step is not None:
            which, saved = f"step {step + 1}", f", of step {step},"
        return (
            f"training stopped: the loss or the gradient norm of {which} is not finite; the "
            f"state before it{saved} is saved. "
            "To go past it, name the step in spec.training.skipSteps or allow some with "
            "spec.training.onNonFinite.skip; then set "
            f"spec.restartNonce to a new text, or run: evergrad resume {context.run.name}"
        )
    saved = f"; the newest checkpoint is of step {step}" if step is not None else ""
    how = "set spec.restartNonce to a new text"
    if reason == Reason.SUSPENDED:
        how = "set spec.suspend to false"
    return f"no pod is left{saved}. To continue, {how}."


def drain_older(context: ReconcileContext) -> Decision | None:
    """Return the decision by which pods from before a restart leave, or None.

    A restart follows a change of ``restartNonce`` or of settings that must be the same on all nodes. New pods
    are created after the old pods are gone, because a group of old and new pods would never agree.
    """
    restart = context.memory.restart
    live = [pod for pod in context.live if pod.restart < restart]
    leaving = [pod for pod in context.leaving if pod.restart < restart]
    coordinators = [
        pod
        for pod in context.observation.coordinators
        if pod.is_live and pod.restart < restart
    ]
    preparing = [pod for pod in context.preparing if pod.restart < restart]
    if not (live or leaving or coordinators or preparing):
        return _renew_group(context)
    ended = [pod for pod in context.nodes if not pod.is_live and pod.restart < restart]
    # As in a suspension, delete all nodes together first, so that the last holder of the state saves it.
    chosen = (
        (*live, *preparing) if live or leaving or preparing else (*coordinators, *ended)
    )
    text = f"{len(live) + len(leaving)} nodes save and leave"
    if preparing:
        text = _PREPARING_LEAVES
    return Decision(
        Action.STOP,
        Phase.RESTARTING,
        Reason.RESTARTING,
        f"spec.restartNonce or a setting has changed: {text}",
        context.memory,
        pods_to_delete=remove(chosen),
        requeue_after=earliest(context.seconds_to_unreachable),
    )


def _renew_group(context: ReconcileContext) -> Decision | None:
    """Return the decision that deletes a Kubernetes PodGroup from before a restart.

    Returns None if there is no such PodGroup or a pod is still in it. The PodGroup has to be created again,
    because its priority class cannot change. A failed run has no pods left whose deletion would also delete
    the PodGroup.
    """
    seen = context.observation
    is_of_before = seen.group_restart < context.memory.restart
    has_group = (POD_GROUP, context.run.name) in seen.hashes
    is_renewable = has_group and seen.group_kind in POD_GROUPS["podGroup"]
    if not (is_renewable and is_of_before) or any(pod.end is None for pod in seen.nodes):
        return None
    # No event shows that the PodGroup is gone, so check again. A refused deletion has its own retry time.
    is_refused = any((one.verb, one.kind) == ("delete", POD_GROUP) for one in seen.failures)
    return Decision(
        Action.STOP,
        Phase.RESTARTING,
        Reason.RESTARTING,
        "spec.restartNonce or a setting has changed: the PodGroup is created again",
        context.memory,
        requeue_after=None if is_refused else earliest(1.0),
    )
