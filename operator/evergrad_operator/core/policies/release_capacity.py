"""Deletes the pods of a run that stays below its minimum, and requests them again later. Pure.

Pods with a host occupy resources that another run may need, and cannot train while other pods of their run
find no host. Two such runs could wait for each other forever.
"""

import hashlib
from dataclasses import replace
from typing import Final

from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.objects.names import Condition, Phase, Reason
from evergrad_operator.core.objects.times import format_duration, format_time, parse_time
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.waiting import explain_refusal

FIRST_PAUSE_SECONDS: Final = 300.0
LONGEST_PAUSE_SECONDS: Final = 3600.0
_AT_WORK: Final = ("Starting", "Running", "Draining")
"""Phases of a coordinator whose group has enough nodes, even if ``nodes.min`` was raised since."""


def give_back_if_short(context: ReconcileContext) -> tuple[ReconcileContext, float | None]:
    """Return the context, and the seconds until a pause begins or ends; None if no pause is due.

    If the run has been below its minimum for too long, a pause has begun in the returned context.
    """
    memory = context.memory
    if context.now < memory.come_again_at:
        return context, memory.come_again_at - context.now
    left = _find_seconds_to_pause(context)
    if left is None or left > 0:
        return context, left

    # Two runs that waited for each other must not return at the same time. Multiply the pause by a factor
    # from 0.5 to 1.5 that depends on the run's uid.
    count = memory.given_back + 1
    digest = hashlib.sha256(f"{context.run.uid}/{count}".encode()).digest()
    pause = find_delay(count, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
    pause *= 0.5 + digest[0] / 255
    # Use whole seconds, because the status stores whole seconds.
    pause = float(int(context.now + pause)) - context.now
    memory = replace(memory, given_back=count, come_again_at=context.now + pause)
    return replace(context, memory=memory), pause


def _find_seconds_to_pause(context: ReconcileContext) -> float | None:
    """Return the seconds after which a run below its minimum pauses, 0 or less if they are over.

    None if the run is not below its minimum, or if no resources are missing.
    """
    memory, least, seen = context.memory, context.run.spec.nodes.min, context.observation
    if context.progress is not None and context.progress.phase in _AT_WORK:
        return None
    # A group may be training although the coordinator was not polled yet, for example after the operator
    # started.
    coordinator = seen.live_coordinator
    is_served = coordinator is not None and coordinator.is_running
    if context.progress is None and is_served and seen.unreachable is None:
        return None
    hosted = sum(bool(pod.node_name) for pod in context.live)
    waiting = [pod for pod in context.live if pod.waiting_reason == "Unschedulable"]
    # If a quota is used up, the missing pods were never created.
    is_refused = any(
        (failure.verb, failure.kind) == ("create", "Pod")
        and explain_refusal(failure, context.run.name).reason == Reason.QUOTA_EXCEEDED
        for failure in seen.failures
    )
    is_short = 0 < hosted < least
    if not is_short or not (waiting or is_refused):
        return None
    # Count the time from the last change of the condition Ready: pods above the minimum may have waited for
    # hours while the group trained. If no coordinator can be created, the run is not training.
    ready = next(
        (one for one in memory.conditions if one.get("type") == Condition.READY), {}
    )
    is_ready = memory.phase == Phase.RUNNING and not (coordinator is None and is_refused)
    changed_at = context.now if is_ready else parse_time(ready.get("lastTransitionTime"))
    since = max(pod.created_at for pod in waiting or context.live)
    since = max(since, changed_at or 0.0)
    return since + context.config.give_back_seconds - context.now


def describe_give_back(context: ReconcileContext) -> str:
    """Return why the run has no pods, and when they are requested again."""
    least = context.run.spec.nodes.min
    waited = format_duration(context.config.give_back_seconds)
    return (
        f"fewer than {least} nodes found a host within {waited}; their pods are given back, so that others "
        f"can use the hosts, and all are asked for again at {format_time(context.memory.come_again_at)}"
    )
