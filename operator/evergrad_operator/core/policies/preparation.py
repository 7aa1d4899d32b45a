"""Prepares a run's data in a separate pod before any node is created. Pure.

| end of the preparation pod | result |
|---|---|
| exit code 0 | the data are prepared and nodes are created |
| exit code 64 | the run fails with the pod's message |
| crash, out of memory, volume full, not started | one failure of the budget; another pod continues the work |
| host fault | another pod continues with a growing delay, on another host if possible |
| any other | another pod continues; it costs no failure |
"""

from collections.abc import Sequence
from typing import Final

from evergrad_common.causes import COUNTED, PodCause
from evergrad_operator.core.decision import Action, Decision
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.pod_messages import (
    describe_disk_remedy,
    describe_end,
    quote,
    stop,
)
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext, RunPhase
from evergrad_operator.core.policies.gang import is_stranded
from evergrad_operator.core.policies.host_faults import MANY_FAULTS
from evergrad_operator.core.policies.lifecycle import earliest, remove
from evergrad_operator.core.policies.record import is_recorded, plan_record
from evergrad_operator.core.policies.scale import find_epoch, is_digest_missing
from evergrad_operator.core.policies.waiting import Obstacle, find_obstacle

_THEN: Final = "set spec.restartNonce to a new text"
_REMEDIES: Final = {
    Reason.USER_ERROR: (
        f"Correct the data and {_THEN}; correct the recipe in a new TrainingRun."
    ),
    Reason.OUT_OF_MEMORY: f"Raise spec.preparation.resources.limits.memory and {_THEN}.",
    Reason.VOLUME_FULL: (
        f"Enlarge the PersistentVolumeClaim or delete what is not needed there; then {_THEN}."
    ),
    Reason.OUT_OF_EPHEMERAL_STORAGE: stop(
        describe_disk_remedy("spec.preparation.resources", then=_THEN)
    ),
    Reason.START_ERROR: f"Check spec.image, spec.template and the node's runtime; then {_THEN}.",
    Reason.WORKER_CRASH: f"Read that pod's log (kubectl logs); to try again, {_THEN}.",
}


def fail_if_unprepared(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run failed if its data cannot be prepared; None otherwise."""
    if not _is_due(context):
        return None
    memory, pods = context.memory, context.observation.preparations
    mine = [pod for pod in pods if pod.restart == memory.restart and pod.end is not None]
    end = mine[-1].end if mine else None
    # Consider only failures of the preparation. ``fail_if_due`` handles failures of nodes.
    if end is None or end.cause not in (*COUNTED, PodCause.USER_ERROR):
        return None
    if end.cause == PodCause.USER_ERROR:
        said = quote(end.message) or "it left no message"
        text = f"the preparation of the data (pod {mine[-1].name}) ended with exit code 64: {said}"
        reason = Reason.USER_ERROR
    else:
        most = context.run.spec.failure_policy.max_failures_without_progress
        if memory.budget.failures <= most:
            return None
        last = memory.last_failure
        cause = last.cause if last is not None else ""
        reason = next((one for one in _REMEDIES if one == cause), Reason.WORKER_CRASH)
        text = (
            f"the preparation of the data failed {memory.budget.failures} times; {most} such failures are "
            f"allowed. Last: {describe_end(last) if last else 'unknown'}"
        )
    return context.finished(Phase.FAILED, reason, f"{stop(text)} {_REMEDIES[reason]}")


def prepare_first(context: ReconcileContext) -> Decision | None:
    """Return the decision to prepare the data before any node is created; None if no preparation is due.

    No preparation is due if the data are prepared, or if nodes are running: nodes prepare missing data
    themselves.
    """
    if not _is_due(context):
        return None
    memory, now = context.memory, context.now
    live = [pod for pod in context.preparing if pod.is_live]

    # Run one pod at a time, because a pod that is being deleted may still write. The pods are sorted; the
    # newest comes last.
    attempt = None
    retry_at = max(memory.budget.retry_at, memory.faults.retry_at)
    if not context.preparing and now >= retry_at:
        visible = (pod.attempt for pod in context.observation.preparations)
        attempt = 1 + max((memory.preparation.attempt, *visible))
    ended = [pod for pod in context.observation.preparations if pod.end is not None]
    # As with nodes, replace a pod whose host cannot pull the image by digest. The next pod uses the tag.
    unobtainable = [pod for pod in live[-1:] if is_digest_missing(pod, memory)]
    stranded = [pod for pod in live[-1:] if is_stranded(pod, context)]
    surplus = (*live[:-1], *(unobtainable or stranded), *ended[:-1])

    # Write the run's record to the PVC before any pod writes to its folder.
    record = plan_record(context, find_epoch(context))
    has_record = is_recorded(context, record)
    wanted = [] if has_record else [context.run.claim_name]
    if attempt is not None:
        wanted.append(names.preparation_pod_name(context.run.name, attempt))
    obstacle = find_obstacle(context, wanted)

    described = _describe(context, live, obstacle)
    return Decision(
        Action.RUN,
        described.phase,
        described.reason,
        described.message,
        memory,
        pods_to_delete=remove(surplus),
        preparation_attempt=attempt,
        record=None if has_record else record,
        is_blocked=described.is_blocked(now),
        requeue_after=earliest(
            retry_at - now if now < retry_at else None,
            context.seconds_to_unreachable,
            described.seconds_to_person(now),
        ),
    )


def _describe(
    context: ReconcileContext, live: Sequence[PodState], obstacle: Obstacle | None
) -> RunPhase:
    # Report obstacles first, then pauses.
    if obstacle is not None:
        is_starting = obstacle.reason == Reason.STARTING
        phase = Phase.PREPARING if is_starting else Phase.WAITING
        return RunPhase(phase, obstacle.reason, obstacle.message, obstacle.needs_person_at)
    if live and live[-1].is_running:
        text = (
            f"pod {live[-1].name} prepares the data; nodes are asked for once that is done"
        )
        return RunPhase(Phase.PREPARING, Reason.PREPARING, text)
    memory = context.memory
    budget, faults, last = memory.budget, memory.faults, memory.last_failure
    retry_at = max(budget.retry_at, faults.retry_at)
    has_many_faults = faults.in_a_row >= MANY_FAULTS
    if context.now >= retry_at and not has_many_faults:
        text = "a pod that prepares the data is starting"
        return RunPhase(Phase.PREPARING, Reason.PREPARING, text)

    text = "another pod that prepares the data is starting"
    if context.now < retry_at:
        text = f"the preparation of the data continues at {format_time(retry_at)}"
    if last is not None:
        text += f". Last: {describe_end(last)}"
    is_of_host = faults.retry_at >= budget.retry_at
    reason = Reason.HOST_FAULTS if is_of_host else Reason.BACKING_OFF
    person_at = 0.0 if has_many_faults else None
    return RunPhase(Phase.WAITING, reason, text, person_at)


def _is_due(context: ReconcileContext) -> bool:
    """Return whether the data have to be prepared before a node may be created."""
    run, known = context.run, context.memory.preparation
    if run.spec.preparation is None or not run.parsed.is_typed:
        return False
    # If the recipe cannot be read, accept the data that were prepared before.
    wanted = run.parsed.preparation_hash or known.prepared
    is_prepared = bool(known.prepared) and known.prepared == wanted
    return not is_prepared and not context.live and not context.leaving
