"""Ends and pauses: a run that is over, suspended, stopped on request or being restarted."""

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
"""Time that a coordinator has to give a first answer before a suspended run lets it go."""
_DELETION_RETRY_SECONDS: Final = 10.0
"""Time until a run is looked at again that was to be deleted, and was changed by somebody meanwhile."""
_NOTED_SECONDS: Final = 1.0
"""Time until a run is looked at again whose end was still to be written into the status."""


def remove(pods: Iterable[PodState]) -> tuple[PodDeletion, ...]:
    """Return deletions of those pods that are not being deleted already, the highest index first."""
    chosen = sorted(
        (pod for pod in pods if not pod.is_deleting),
        key=lambda pod: (pod.index, pod.attempt),
        reverse=True,
    )
    return tuple(PodDeletion(pod.name, pod.uid) for pod in chosen)


def earliest(*seconds: float | None) -> float | None:
    """Return the seconds until something is due next, at least one."""
    return min((max(1.0, one) for one in seconds if one is not None), default=None)


# ---- over --------------------------------------------------------------------------------------------------


def fail_at_deadline(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run failed, if its time is over; None otherwise."""
    left = seconds_to_deadline(context)
    if left is None or left > 0:
        return None
    limit = context.run.spec.active_deadline_seconds or 0
    text = f"the run was not complete {format_duration(limit)} after its start (spec.activeDeadlineSeconds). "
    remedy = (
        "State is saved as the pods leave; raise the limit and set spec.restartNonce to a "
        "new text to go on."
    )
    return context.finished(
        Phase.FAILED,
        Reason.DEADLINE_EXCEEDED,
        text + remedy,
    )


def seconds_to_deadline(context: ReconcileContext) -> float | None:
    """Return the seconds until the run's time is over; None without a limit.

    Time in suspension does not count: the clock begins anew after it.
    """
    limit, start = context.run.spec.active_deadline_seconds, context.memory.start_time
    return None if limit is None or start is None else start + limit - context.now


def conclude(context: ReconcileContext) -> Decision:
    """Conclude a run that is over: pods at work may end by themselves, then the coordinator goes; much
    later all children.

    Ended pods stay for their logs until ``ttlSecondsAfterFinished``, as a run with ``ttlDeletes: Run`` does.
    """
    finish, config, now = context.memory.finish, context.config, context.now
    if finish is None:
        raise ValueError("only a run that is over is concluded")
    ttl = context.run.spec.ttl_seconds_after_finished
    # Pods may be all that shows the end: until the status has it, those that do stay. A lost write would
    # otherwise let the run begin again.
    is_noted = context.observation.status.finish is not None
    # The last stage: nothing is left but the record on the volume. Checkpoints that wait are evaluated first.
    is_evaluated = (
        not is_evaluation_due(context.memory, context.observation)
        and not context.evaluating
    )
    # A run that was complete before it was made is there for as long: somebody has just made it.
    expiry = None if ttl is None else max(finish.at, context.run.created_at) + ttl
    if expiry is not None and now >= expiry and is_evaluated and is_noted:
        return _clean(context, finish)

    # The pods of a failed run have time to write their last words, unless nothing may go on at all.
    grace = (
        finish.at + config.fail_grace_seconds if finish.phase == Phase.FAILED else finish.at
    )
    is_due = finish.reason in _AT_ONCE or now >= grace
    chosen = [pod for pod in context.live if is_due or not pod.is_running]
    chosen += context.preparing
    at_work = [pod for pod in (*context.live, *context.leaving) if pod.is_running]
    # The coordinator goes last: pods that are still at work ask it whether they may end.
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
            # Beyond that time the end of an evaluation causes the pass.
            None if expiry is None or now >= expiry else expiry - now,
        ),
    )


def _clean(context: ReconcileContext, finish: RecordedFinish) -> Decision:
    """Return the last decision about a run: its children go, and where it asks for that, the run, too."""
    seen, record = context.observation, _completed_record(context)
    wants_deletion = context.run.spec.ttl_deletes == DELETES_RUN
    is_allowed = wants_deletion and context.config.allow_run_deletion
    # Without the record on the volume the same file, applied again, would train again.
    deletes_run = is_allowed and record is None
    everything = (*context.nodes, *seen.coordinators, *seen.preparations, *seen.evaluations)
    return Decision(
        Action.CLEAN,
        finish.phase,
        finish.reason,
        _said(context),
        context.memory,
        # With the run, the garbage collector takes its pods, by their owner references.
        pods_to_delete=() if deletes_run else remove(everything),
        record=record,
        deletes_run=deletes_run,
        requeue_after=_DELETION_RETRY_SECONDS if is_allowed else None,
    )


def _said(context: ReconcileContext) -> str:
    """Return the message of the run's end, and which later edits of the file have no effect on it."""
    finish, nonce = context.memory.finish, context.run.spec.restart_nonce
    message = finish.message if finish else ""
    # The webhook refuses this, but may have been down, and the right may have been taken away since.
    if (
        context.run.spec.ttl_deletes == DELETES_RUN
        and not context.config.allow_run_deletion
    ):
        message += f"; the run will not be deleted: {NO_DELETION}"
    if finish is None or finish.phase != Phase.COMPLETE:
        return message

    # A complete run never trains again: its message names the edits that have no effect.
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
    """Return the record of a complete run for the PVC, which survives the loss of its status; None where
    there is nothing to write."""
    finish, own, memory = context.memory.finish, find_own_record(context), context.memory
    if finish is None or finish.phase != Phase.COMPLETE:
        return None
    # A run that is complete by the PVC's own word writes nothing there, and a record is written once.
    is_written = own is not None and own.complete is not None and own.uid == context.run.uid
    if finish.reason == Reason.ALREADY_COMPLETE or is_written:
        return None
    if context.observation.claim is None:
        return None

    # Epochs only grow, also in the record of a run that is over.
    epoch = max(memory.coordinator.attempt, own.epoch if own else -1)
    complete: dict[str, object] = {"at": format_time(finish.at)}
    if memory.training.step is not None:
        complete["step"] = memory.training.total_steps or memory.training.step
    return replace(plan_record(context, epoch), complete=complete)


# ---- paused ------------------------------------------------------------------------------------------------


def stop_if_asked(context: ReconcileContext) -> Decision | None:
    """Return the decision for a run that is suspended or stopped on request; None for any other.

    Nodes save and leave, then the coordinator goes.
    """
    progress, memory = context.progress, context.memory
    if context.run.spec.suspend:
        # Resuming by hand also takes back a stop that the recipe asked for.
        memory = replace(memory, stop_reason="")
        return _drain(replace(context, memory=memory), Reason.SUSPENDED)

    # A coordinator whose nodes have all left, or which was sent a signal, was not asked to stop the run.
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
    """Return the decision by which all nodes leave together, so that the last holder of the state saves it;
    the coordinator serves until then."""
    memory, coordinators = context.memory, context.observation.coordinators
    preparing, ended = context.preparing, context.observation.preparations
    beside = (*preparing, *context.evaluating)
    working = (*context.live, *context.leaving, *beside)
    live_coordinators = [pod for pod in coordinators if pod.is_live]
    # The last node has reported its save to the coordinator, which may not have been polled since: its next
    # answer is waited for. A new coordinator may not have been polled since its nodes came.
    is_young = memory.training.step is None and any(
        context.now - pod.created_at < _FIRST_WORDS_SECONDS for pod in live_coordinators
    )
    # An operator that has just started has no answer yet, whereas the coordinator knows of the last save. The
    # stop of a run is such an answer itself.
    is_unheard = is_young or (
        context.run.spec.suspend
        and context.progress is None
        and context.observation.unreachable is None
        and any(pod.is_running and pod.ip for pod in live_coordinators)
    )
    is_stale = is_unheard or (
        context.progress is not None and context.progress.connected > 0
    )
    # Only the coordinator shows that the run itself has stopped: no pod goes before the status has it.
    is_noted = context.run.spec.suspend or context.observation.status.is_stopped

    # Nodes first, then the coordinator, to which the last save is reported.
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
        # Only a person can say whether the step or the recipe is to blame for a loss that is not finite.
        is_blocked=reason == Reason.NON_FINITE,
    )


def _describe_pause(context: ReconcileContext, reason: Reason) -> str:
    """Say what is saved, and how to go on."""
    step = context.memory.training.checkpoint_step
    if reason == Reason.NON_FINITE:
        # The state before the step that is not finite has been saved, so that step is the next one.
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
    return f"no pod is left{saved}. To go on, {how}."


def drain_older(context: ReconcileContext) -> Decision | None:
    """Return the decision by which pods of before a restart leave, as in a suspension; None where there are
    none.

    A restart follows a change of ``restartNonce`` or of settings that nodes must have alike. New pods come
    when the old ones are gone: a group of both would never agree.
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
    # As in a suspension: nodes first, all together, so that the last holder of the state saves it.
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
    """Return the decision by which Kubernetes' PodGroup of before a restart goes; None where there is none,
    or a pod is in it.

    Its priority class cannot change. A run that had failed has no pod left whose leaving would take it along.
    """
    seen = context.observation
    is_of_before = seen.group_restart < context.memory.restart
    has_group = (POD_GROUP, context.run.name) in seen.hashes
    is_renewable = has_group and seen.group_kind in POD_GROUPS["podGroup"]
    if not (is_renewable and is_of_before) or any(pod.end is None for pod in seen.nodes):
        return None
    # No event shows that it is gone. A refusal has a time of its own.
    is_refused = any((one.verb, one.kind) == ("delete", POD_GROUP) for one in seen.failures)
    return Decision(
        Action.STOP,
        Phase.RESTARTING,
        Reason.RESTARTING,
        "spec.restartNonce or a setting has changed: the PodGroup is made anew",
        context.memory,
        requeue_after=None if is_refused else earliest(1.0),
    )
