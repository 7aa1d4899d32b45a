"""A run that stays below its minimum gives its pods back, and asks for them again later. Pure.

Pods that have a host hold what another run may wait for, and train nothing while others of their run find
none: two such runs could wait for each other for ever.
"""

import hashlib
from dataclasses import replace
from typing import Final

from evergrad_operator.core.objects.names import Condition, Phase, Reason
from evergrad_operator.core.objects.times import format_duration, format_time, parse_time
from evergrad_operator.core.policies.budget import find_delay
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.waiting import explain_refusal

FIRST_PAUSE_SECONDS: Final = 300.0
LONGEST_PAUSE_SECONDS: Final = 3600.0
_AT_WORK: Final = ("Starting", "Running", "Draining")
"""Phases of a coordinator whose group has enough nodes, also where ``nodes.min`` was raised since."""


def give_back_if_short(context: ReconcileContext) -> tuple[ReconcileContext, float | None]:
    """Return the context with a pause begun, if the run has been below its minimum for too long, and the
    seconds until a pause begins or ends."""
    memory, least, seen = context.memory, context.run.spec.nodes.min, context.observation
    if context.now < memory.come_again_at:
        return context, memory.come_again_at - context.now
    if context.progress is not None and context.progress.phase in _AT_WORK:
        return context, None
    # A group may be at work that the coordinator has not told of yet, as where the operator has just started.
    coordinator = seen.live_coordinator
    is_served = coordinator is not None and coordinator.is_running
    if context.progress is None and is_served and seen.unreachable is None:
        return context, None
    hosted = sum(bool(pod.node_name) for pod in context.live)
    waiting = [pod for pod in context.live if pod.waiting_reason == "Unschedulable"]
    # Where a quota is used up, the pods that are missing were never made.
    is_refused = any(
        (failure.verb, failure.kind) == ("create", "Pod")
        and explain_refusal(failure, context.run.name).reason == Reason.QUOTA_EXCEEDED
        for failure in seen.failures
    )
    is_short = 0 < hosted < least
    if not is_short or not (waiting or is_refused):
        return context, None
    # Pods above the minimum may have waited for hours beside a group that trained until a moment ago, at a
    # long step or without a report of its steps. Where no coordinator can be made, nothing trains for long.
    ready = next(
        (one for one in memory.conditions if one.get("type") == Condition.READY), {}
    )
    is_ready = memory.phase == Phase.RUNNING and not (coordinator is None and is_refused)
    changed_at = context.now if is_ready else parse_time(ready.get("lastTransitionTime"))
    since = max(pod.created_at for pod in waiting or context.live)
    since = max(since, changed_at or 0.0)
    left = since + context.config.give_back_seconds - context.now
    if left > 0:
        return context, left

    # Two runs that have waited for each other must not come again at the same moment: each has a pause of its
    # own, from a half to one and a half times the common one.
    count = memory.given_back + 1
    digest = hashlib.sha256(f"{context.run.uid}/{count}".encode()).digest()
    pause = find_delay(count, first=FIRST_PAUSE_SECONDS, longest=LONGEST_PAUSE_SECONDS)
    pause *= 0.5 + digest[0] / 255
    # Whole seconds, as the status keeps them.
    pause = float(int(context.now + pause)) - context.now
    memory = replace(memory, given_back=count, come_again_at=context.now + pause)
    return replace(context, memory=memory), pause


def describe_give_back(context: ReconcileContext) -> str:
    """Return why no pod is there, and when the next ones come."""
    least = context.run.spec.nodes.min
    waited = format_duration(context.config.give_back_seconds)
    return (
        f"fewer than {least} nodes found a host within {waited}; their pods are given back, so that others "
        f"can use the hosts, and all are asked for again at {format_time(context.memory.come_again_at)}"
    )
