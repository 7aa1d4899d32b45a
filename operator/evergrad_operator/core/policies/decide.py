"""Runs the policies in order. The first policy that returns a decision decides."""

from dataclasses import replace

from evergrad_common.contract import SOME_FINISHED
from evergrad_operator.core.decision import Action, Decision
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.problems import list_problems
from evergrad_operator.core.objects.times import format_time, parse_time
from evergrad_operator.core.observe.evaluation import EvaluationProgress
from evergrad_operator.core.observe.observe import (
    Observation,
    PreviousStatus,
    VolumeRecord,
)
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.observe.preparation import DataPreparation
from evergrad_operator.core.policies.completion import (
    complete_if_done,
    complete_if_recorded,
)
from evergrad_operator.core.policies.conflict import refuse_if_taken
from evergrad_operator.core.policies.context import ReconcileContext, RunPhase
from evergrad_operator.core.policies.evaluation import evaluate_beside
from evergrad_operator.core.policies.failure import (
    describe_failure,
    describe_host_faults,
    fail_if_due,
    is_backing_off,
)
from evergrad_operator.core.policies.gang import find_newest_gang, joins_pod_group
from evergrad_operator.core.policies.host_faults import MANY_FAULTS
from evergrad_operator.core.policies.lifecycle import (
    conclude,
    drain_older,
    earliest,
    fail_at_deadline,
    remove,
    seconds_to_deadline,
    stop_if_asked,
)
from evergrad_operator.core.policies.memory_update import remember
from evergrad_operator.core.policies.preparation import fail_if_unprepared, prepare_first
from evergrad_operator.core.policies.record import is_recorded, plan_record
from evergrad_operator.core.policies.release_capacity import (
    describe_give_back,
    give_back_if_short,
)
from evergrad_operator.core.policies.scale import Scale, decide_scale
from evergrad_operator.core.policies.waiting import (
    Obstacle,
    explain_refusal,
    find_claim_obstacle,
    find_group_obstacle,
    find_leftover_obstacle,
    find_obstacle,
    find_profile_obstacle,
)

_CLAIM_RETRY_SECONDS = 10.0
_PROFILE_RETRY_SECONDS = 30.0
_LONGEST_PROFILE_RETRY_SECONDS = 300.0
"""Longest pause between two reads of a profile that is not valid.

The pause is a quarter of the time for which the run has been held. For example, the operator reads a profile
again every 30 s during the first two minutes, and every 300 s after 20 minutes.
"""
_WARM_UP_SECONDS = 180.0
"""Time that a node's pod may need to start, import its libraries and join the group."""
_GROUP_PHASES = {
    "Running": Phase.RUNNING,
    "Draining": Phase.RUNNING,
    "Starting": Phase.STARTING,
    "Waiting": Phase.WAITING,
}
"""Phase of a run that wants to train, by the phase that its coordinator reports."""


def decide(observation: Observation, config: Config, now: float) -> Decision:
    """Decide which action to take for the run at ``now``, in seconds since 1970.

    The same arguments always give the same decision.
    """
    # If the run is deleted with --cascade=orphan, the garbage collector removes the owner from the run's
    # children. The children have not ended, so do not count their ends.
    memory = observation.status
    if not observation.run.is_orphaning:
        memory = remember(observation, config, now)
    context = ReconcileContext(observation, memory, config, now)
    decision = evaluate_beside(context, _decide(context))

    if decision.action != Action.HOLD:
        decision = _delete_sidecars(context, decision)

    # If a run ends or pauses, add to the message why its pods cannot be deleted. A run that trains reports
    # its refusals as obstacles.
    if decision.action in (Action.RUN, Action.HOLD) or not observation.failures:
        return decision
    refusal = explain_refusal(observation.failures[0], observation.run.name)
    return replace(decision, message=f"{decision.message}; {refusal.message}")


def _delete_sidecars(context: ReconcileContext, decision: Decision) -> Decision:
    """Also delete pods in which only an injected sidecar still runs.

    They would hold their hosts' resources forever. The end of a pod is written to the status before the pod
    is deleted, because an operator that starts later could not find out how the pod ended.
    """
    observation = context.observation
    chosen = {pod.name for pod in decision.pods_to_delete}
    beside = (*observation.preparations, *observation.evaluations)
    left = [
        pod
        for pod in (*context.nodes, *beside)
        if pod.end is not None and pod.has_sidecar and pod.name not in chosen
    ]
    recorded = [pod for pod in left if _is_end_recorded(pod, observation.status)]
    # The pass after the write of the status deletes the other pods.
    seconds = 1.0 if len(recorded) < len(left) else None
    return replace(
        decision,
        pods_to_delete=decision.pods_to_delete + remove(recorded),
        requeue_after=earliest(decision.requeue_after, seconds),
    )


def _is_end_recorded(pod: PodState, known: PreviousStatus) -> bool:
    """Return whether the status contains the end of this pod, or needs it no more."""
    if known.finish is not None and pod.role != names.ROLE_EVALUATION:
        return True
    newest_of: dict[str, DataPreparation | EvaluationProgress] = {
        names.ROLE_PREPARATION: known.preparation,
        names.ROLE_EVALUATION: known.evaluation,
    }
    newest = newest_of.get(pod.role)
    if newest is None:
        return known.has_recorded(pod.index, pod.attempt)
    # The status stores only the newest preparation and evaluation pod; older pods are recorded.
    return pod.attempt < newest.attempt or (
        pod.attempt == newest.attempt and newest.is_recorded
    )


def _decide(context: ReconcileContext) -> Decision:
    if context.run.is_deleting:
        return _hold_while_deleted(context)
    if context.memory.finish is not None:
        return conclude(context)
    ending = _end_if_due(context)
    if ending is not None:
        return ending

    # Check pauses, problems of the file, and pods from before a restart. Train only if there are none.
    started = _start_clock(context)
    decision = (
        stop_if_asked(context)
        or _hold_if_wrong(started)
        or drain_older(context)
        or _run(started)
    )
    return replace(
        decision,
        requeue_after=earliest(decision.requeue_after, seconds_to_deadline(context)),
    )


def _hold_while_deleted(context: ReconcileContext) -> Decision:
    """Hold a run that is being deleted, because the garbage collector deletes all its children."""
    # If the run is over, its phase and reason stay.
    finish = context.memory.finish
    if finish is not None:
        return context.hold(finish.phase, finish.reason, finish.message)
    text = "the run is being deleted; its pods save and leave"
    if context.run.is_orphaning:
        text = (
            "the run is being deleted without its children (--cascade=orphan); its pods keep running, "
            "and no operator manages them"
        )
    return context.hold(Phase.RUNNING, Reason.DELETING, text)


def _end_if_due(context: ReconcileContext) -> Decision | None:
    """Return the decision for a run that is over or whose last pods are ending; None if the run continues."""
    # Check in this order: a run that is complete by the volume's record must not train or fail.
    for end in (complete_if_recorded, refuse_if_taken):
        if (over := end(context)) is not None:
            return conclude(over)
    done = complete_if_done(context)
    if done is not None and done.memory.finish is not None:
        return conclude(done)
    if done is not None:
        # All steps are done. Running pods write the report and end. Pods that do not run yet are not needed.
        since = done.memory.finishing_since or done.now
        return Decision(
            Action.FINISH,
            Phase.RUNNING,
            Reason.FINISHING,
            "all steps are done; the last pods write the report and end",
            done.memory,
            pods_to_delete=remove(pod for pod in done.live if not pod.is_running),
            requeue_after=earliest(since + done.config.finish_grace_seconds - done.now),
        )
    for end in (fail_if_unprepared, fail_if_due, fail_at_deadline):
        if (over := end(context)) is not None:
            return conclude(over)
    return None


def _start_clock(context: ReconcileContext) -> ReconcileContext:
    """Start the clock of the run's deadline if it is not running. It also runs while the run waits."""
    memory = context.memory
    if memory.start_time is not None:
        return context
    # Forget the time of the last step before a pause, so that the pause does not count as time without a
    # step.
    training = memory.training
    if training.updated_at == context.observation.status.training.updated_at:
        training = replace(training, updated_at=None)
    memory = replace(memory, start_time=context.now, training=training)
    return replace(context, memory=memory)


def _hold_if_wrong(context: ReconcileContext) -> Decision | None:
    """Return a decision that holds the run if its spec or profile is not valid; None otherwise.

    This check repeats ``evergrad validate``, because the webhook may have been down when the run was stored,
    or may not be installed.
    """
    known = context.observation.status
    problems = context.run.find_obstacles(has_begun=bool(known.recipe_hash))
    is_read = context.run.profile.is_read
    if not problems and is_read:
        return None
    reason, message, is_blocked = Reason.INVALID_SPEC, list_problems(problems), True
    if not problems:
        obstacle = find_profile_obstacle(context)
        reason, message = obstacle.reason, obstacle.message
        is_blocked = obstacle.needs_person_at is not None
    held = context.hold(Phase.WAITING, reason, message)
    if not known.recipe_hash:
        # Do not record the recipe or image of a run that has not begun: the corrected file may contain
        # others.
        memory = replace(
            held.memory,
            recipe_hash="",
            image="",
            start_time=None,
            coordinator=known.coordinator,
        )
        held = replace(held, memory=memory)
    # No watch reports a change of a profile, so check it again after a pause.
    is_of_profile = bool(context.run.profile.problems) or not is_read
    return replace(
        held,
        is_blocked=is_blocked,
        requeue_after=_seconds_to_profile(context) if is_of_profile else None,
    )


def _seconds_to_profile(context: ReconcileContext) -> float:
    """Return the seconds until a profile that is not valid or could not be read is read again."""
    conditions = context.observation.status.conditions
    since = next(
        (
            parse_time(one.get("lastTransitionTime"))
            for one in conditions
            if (one.get("type"), one.get("status")) == (names.Condition.STALLED, "True")
        ),
        None,
    )
    held = 0.0 if since is None else context.now - since
    return min(_LONGEST_PROFILE_RETRY_SECONDS, max(_PROFILE_RETRY_SECONDS, held / 4))


def _run(context: ReconcileContext) -> Decision:
    """Decide on the claim, the coordinator and the nodes of a run that wants to train."""
    # Without its volume no pod can start, so create no pod and write no record.
    obstacle = (
        find_leftover_obstacle(context)
        or find_claim_obstacle(context)
        or find_group_obstacle(context)
    )
    if obstacle is not None:
        return _hold_for(context, obstacle)
    preparing = prepare_first(context)
    if preparing is not None:
        return preparing

    context, seconds_to_pause = give_back_if_short(context)
    scale = decide_scale(context)
    memory = replace(
        context.memory,
        recorded=context.memory.recorded | scale.withdrawn,
        gang=find_newest_gang(context),
    )
    planned = plan_record(context, scale.epoch)
    record = None if is_recorded(context, planned) else planned
    obstacle = find_obstacle(context, _list_wanted(context, scale, record))
    described = _describe(context, scale, obstacle)
    return Decision(
        Action.RUN,
        described.phase,
        described.reason,
        described.message,
        memory,
        nodes_to_create=scale.nodes_to_create,
        gang=scale.gang,
        joins_group=joins_pod_group(context),
        pods_to_delete=scale.pods_to_delete + remove(context.preparing),
        coordinator_attempt=scale.coordinator_attempt,
        bounds=scale.bounds,
        record=record,
        is_blocked=described.is_blocked(context.now),
        requeue_after=earliest(
            scale.requeue_after,
            seconds_to_pause,
            described.seconds_to_person(context.now),
        ),
    )


def _hold_for(context: ReconcileContext, obstacle: Obstacle) -> Decision:
    """Hold the run until the obstacle before its first pod is gone."""
    held = context.hold(Phase.WAITING, obstacle.reason, obstacle.message)
    person_at = obstacle.needs_person_at
    is_blocked = person_at is not None and context.now >= person_at
    return replace(held, is_blocked=is_blocked, requeue_after=_CLAIM_RETRY_SECONDS)


def _list_wanted(
    context: ReconcileContext, scale: Scale, record: VolumeRecord | None
) -> list[str]:
    """Return the names of the objects that are wanted now. A refusal of any other object is no obstacle."""
    run = context.run
    wanted = [names.node_pod_name(run.name, *node) for node in scale.nodes_to_create]
    if scale.coordinator_attempt is not None:
        wanted.append(names.coordinator_pod_name(run.name, scale.coordinator_attempt))
    if record is not None:
        wanted.append(run.claim_name)
    return wanted


def _describe(
    context: ReconcileContext, scale: Scale, obstacle: Obstacle | None
) -> RunPhase:
    phase = _find_phase(context, scale, obstacle)
    if phase == Phase.RUNNING:
        return _describe_training(context, scale, obstacle)

    # Report the first of these: a time at which capacity was given back, an obstacle that a person or the
    # cluster can resolve, host faults, a pause, and last the coordinator's reason to wait.
    memory, progress = context.memory, context.progress
    if context.now < memory.come_again_at:
        return RunPhase(Phase.WAITING, Reason.GIVEN_BACK, describe_give_back(context))
    if obstacle is not None:
        is_starting = obstacle.reason == Reason.STARTING
        found = Phase.STARTING if is_starting else Phase.WAITING
        return RunPhase(found, obstacle.reason, obstacle.message, obstacle.needs_person_at)
    has_many_faults = memory.faults.in_a_row >= MANY_FAULTS
    if scale.faulty or has_many_faults:
        text = describe_host_faults(context)
        person_at = 0.0 if has_many_faults else None
        return RunPhase(Phase.WAITING, Reason.HOST_FAULTS, text, person_at)
    if is_backing_off(context):
        text = f"the next pods are created at {format_time(memory.budget.retry_at)}"
        if memory.last_failure:
            text += f". Last: {describe_failure(memory.last_failure)}"
        return RunPhase(Phase.WAITING, Reason.BACKING_OFF, text)
    if progress is not None and phase == Phase.WAITING:
        return RunPhase(phase, Reason.WAITING_FOR_NODES, progress.message)
    text = "pods are starting, or the group is forming"
    return RunPhase(phase, Reason.STARTING, text)


def _find_phase(
    context: ReconcileContext, scale: Scale, obstacle: Obstacle | None
) -> Phase:
    """Return whether the run trains, starts or waits, by the newest known state of its group."""
    # Use the phase that the coordinator reports.
    progress, memory = context.progress, context.memory
    if progress is not None:
        phase = _GROUP_PHASES.get(progress.phase, Phase.STARTING)
        # If all pods exist and the newest is younger than the warm-up time, the run is starting, not waiting.
        newest = max((pod.created_at for pod in context.live), default=0.0)
        is_warming_up = scale.missing == 0 and context.now - newest < _WARM_UP_SECONDS
        if phase == Phase.WAITING and obstacle is None and is_warming_up:
            return Phase.STARTING
        return phase
    # If the coordinator was not polled yet, for example after a start of the operator, keep the last known
    # phase.
    has_coordinator = context.observation.live_coordinator is not None
    if has_coordinator and memory.phase in _GROUP_PHASES.values():
        return Phase(memory.phase)
    # Without a coordinator, nodes continue to train until the next coordinator takes over the group.
    is_training = memory.phase == Phase.RUNNING and context.live
    return Phase.RUNNING if is_training else Phase.STARTING


def _describe_training(
    context: ReconcileContext, scale: Scale, obstacle: Obstacle | None
) -> RunPhase:
    # A run that trains needs no person, so only add the obstacle to its message.
    progress, memory = context.progress, context.memory
    behind = obstacle.message if obstacle else ""
    reason = Reason.TRAINING
    text = f"{context.ready} of {context.run.spec.nodes.largest} nodes train"
    if scale.coordinator_attempt is not None:
        reason = Reason.COORDINATOR_LOST
        text = "the coordinator is being replaced; training continues"
    elif progress is not None and progress.reason == SOME_FINISHED:
        text = progress.message
    elif scale.faulty and not behind:
        behind = describe_host_faults(context)
    if memory.training.failed_saves and not behind:
        # The condition CheckpointHealthy contains the reason and the remedy.
        failed = memory.training.failed_saves
        times = "the last save" if failed == 1 else f"the last {failed} saves"
        behind = f"{times} failed (CheckpointHealthy)"
    message = f"{text}; {behind}" if behind else text
    return RunPhase(Phase.RUNNING, reason, message)
