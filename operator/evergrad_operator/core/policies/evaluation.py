"""Evaluates a run's checkpoints in separate pods, during and after the training. Pure.

One pod at a time evaluates the oldest waiting checkpoint.

| the run | its evaluation |
|---|---|
| trains, or is over | a pod is created for the oldest waiting checkpoint |
| waits, starts, or is held because of an error in its file | a running pod continues, no pod is created |
| is suspended, stopped or restarted | the pod is deleted; its results so far are kept |
| has exceeded its deadline, or uses another run's folder | the pod is deleted, no pod is created |
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from evergrad_operator.core.decision import Action, Decision, EvaluationPod
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.names import EvaluationState, Phase
from evergrad_operator.core.objects.times import format_time
from evergrad_operator.core.observe.evaluation import EvaluationProgress, take_up
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.evaluation_ends import NONE_AFTER, is_evaluation_due
from evergrad_operator.core.policies.gang import is_stranded
from evergrad_operator.core.policies.lifecycle import earliest, remove
from evergrad_operator.core.policies.waiting import explain_pod, explain_refusal

_NO_SECTION: Final = "the run has no spec.evaluation any more: no checkpoint is evaluated"


def evaluate_beside(context: ReconcileContext, decision: Decision) -> Decision:
    """Return the decision with the due steps of the evaluation. Phase, reason and message do not change."""
    run, pods = context.run, context.observation.evaluations
    live = [pod for pod in pods if pod.is_live]
    if run.is_deleting or decision.action == Action.CLEAN:
        return decision
    if run.spec.evaluation is None or not run.parsed.is_typed:
        return _withdraw(decision, live)

    memory = decision.memory
    known = take_up(memory.evaluation, memory.training.checkpoint_step)
    memory = replace(memory, evaluation=known)
    finish = memory.finish
    is_over = finish is not None and finish.reason not in NONE_AFTER
    is_training = decision.action == Action.RUN and decision.phase == Phase.RUNNING
    has_to_leave = decision.action == Action.STOP or (finish is not None and not is_over)
    surplus = _find_surplus(context, memory.restart, live, is_over=is_over)
    if has_to_leave:
        surplus = [*live, *(pod for pod in pods if decision.phase == Phase.SUSPENDED)]

    # Run one pod at a time, because a pod that is being deleted still writes.
    host, made, now = _choose_host(context, is_over=is_over), None, context.now
    may_make = (
        (is_training or is_over)
        and host is not None
        and is_evaluation_due(memory, context.observation)
    )
    if may_make and not context.evaluating and now >= known.tries.retry_at:
        visible = (pod.attempt for pod in pods)
        made = EvaluationPod(
            step=known.pending[0],
            attempt=1 + max((known.attempt, *visible)),
            host=host or "",
        )
    staying = [pod for pod in live if pod not in surplus]
    state, message = _describe(context, known, staying, made, may_make=may_make)
    known = replace(known, state=state.value, message=message)
    # Skip pods that the decision deletes already because the run ends or pauses.
    chosen = {one.name for one in decision.pods_to_delete}
    leaving = remove(pod for pod in surplus if pod.name not in chosen)
    return replace(
        decision,
        memory=replace(memory, evaluation=known),
        evaluation=made,
        pods_to_delete=decision.pods_to_delete + leaving,
        requeue_after=earliest(
            decision.requeue_after,
            known.tries.retry_at - now if may_make and now < known.tries.retry_at else None,
            context.seconds_to_unreachable,
        ),
    )


def _withdraw(decision: Decision, live: Sequence[PodState]) -> Decision:
    """Return the decision for a run without ``spec.evaluation``, which may have been removed."""
    memory = decision.memory
    known = memory.evaluation
    if known.state:
        # Keep the results. Reset the state and the waiting checkpoints.
        state, message = EvaluationState.UP_TO_DATE.value, _NO_SECTION
        known = replace(known, pending=(), state=state, message=message)
    return replace(
        decision,
        memory=replace(memory, evaluation=known),
        pods_to_delete=decision.pods_to_delete + remove(live),
    )


def _find_surplus(
    context: ReconcileContext, restart: int, live: Sequence[PodState], *, is_over: bool
) -> list[PodState]:
    """Return the pods to delete.

    These are all pods except the newest, pods from before a restart, pods that Kueue holds forever, and a pod
    that keeps a single-host volume on a host without a node of the run, or that waits for such a host.
    """
    pods = context.observation.evaluations
    ended = [pod for pod in pods if pod.end is not None]
    surplus = [*live[:-1], *ended[:-1]]
    for pod in live[-1:]:
        hosts = {node.node_name for node in context.live if node.node_name}
        is_in_the_way = _has_one_host(context) and pod.node_name not in {"", *hosts}
        is_in_the_way = is_in_the_way and bool(context.live) and not is_over
        # The host of a node that is being deleted is still valid.
        asked_for = hosts | {node.node_name for node in context.leaving}
        is_waiting = bool(pod.asked_host) and not pod.node_name
        is_in_vain = is_waiting and pod.asked_host not in asked_for
        # A run that has no nodes at the moment may return to that host.
        is_in_vain = is_in_vain and (bool(context.live) or is_over)
        is_of_before = pod.restart < restart
        if is_of_before or is_in_the_way or is_in_vain or is_stranded(pod, context):
            surplus.append(pod)
    return surplus


def _has_one_host(context: ReconcileContext) -> bool:
    """Return whether only one host at a time can mount the run's volume."""
    claim = context.observation.claim
    return claim is not None and "ReadWriteMany" not in (
        claim.spec.get("accessModes") or ()
    )


def _choose_host(context: ReconcileContext, *, is_over: bool) -> str | None:
    """Return the host of a new pod; empty for any host, None if the pod has to wait for a host."""
    working = [pod for pod in (*context.live, *context.leaving) if pod.node_name]
    if not _has_one_host(context):
        return ""
    if not working:
        return "" if is_over else None
    claim = context.observation.claim
    is_for_one_pod = claim is not None and "ReadWriteOncePod" in (
        claim.spec.get("accessModes") or ()
    )
    return None if is_for_one_pod else working[0].node_name


def _describe(
    context: ReconcileContext,
    known: EvaluationProgress,
    live: Sequence[PodState],
    made: EvaluationPod | None,
    *,
    may_make: bool,
) -> tuple[EvaluationState, str]:
    """Return the state and the message of the evaluation for the status."""
    # A failed evaluation waits for an edit of the run, even if pods still exist.
    if known.failed == context.run.generation:
        return EvaluationState.FAILED, known.failure
    # Report the state of the newest pod before the waiting steps, because it is more specific.
    for pod in live[-1:]:
        if pod.is_running:
            text = f"pod {pod.name} evaluates a checkpoint"
            return EvaluationState.EVALUATING, text
        obstacle = explain_pod(pod, context)
        if obstacle is not None:
            return EvaluationState.WAITING, obstacle.message
    if live or made is not None:
        name = live[-1].name if live else ""
        if made is not None:
            name = names.evaluation_pod_name(context.run.name, made.step, made.attempt)
        for failure in context.observation.failures:
            if (failure.verb, failure.name) == ("create", name):
                refusal = explain_refusal(failure, context.run.name)
                return EvaluationState.WAITING, refusal.message
        return EvaluationState.WAITING, f"pod {name} is starting"
    if not known.pending:
        text = (
            "no checkpoint waits" if known.seen >= 0 else "no checkpoint was reported yet"
        )
        return EvaluationState.UP_TO_DATE, text
    finish = context.memory.finish
    if finish is not None and finish.reason in NONE_AFTER:
        text = f"nothing is evaluated after this end of the run ({finish.reason})"
        return EvaluationState.WAITING, text
    if not may_make:
        return EvaluationState.WAITING, "no pod is created before the run trains or is over"
    text = "the previous pod is leaving"
    if context.now < known.tries.retry_at:
        text = f"the next pod is created at {format_time(known.tries.retry_at)}"
    return (
        EvaluationState.WAITING,
        f"{text}. Last: {known.failure}" if known.failure else text,
    )
