"""Decides which nodes in a queue of Kueue are admitted together, wait, or leave again. Pure.

Kueue admits a group of pods as a unit, and the size of a group is fixed. The rules follow from that:

| state of the newest group | a node below the minimum that has no pod |
|---|---|
| no pod of it is live, or there is no group | is created with all other such nodes, as a new group |
| it is live, and still counts the node's last pod | waits: Kueue would delete the new pod as excess |
| it is live and has room | joins it |
| it is live and has no room | is admitted alone |

A node above the minimum is admitted alone after all nodes below the minimum have a host. It leaves if nodes
below the minimum wait again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.decision import Gang
from evergrad_operator.core.objects import names
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext

HELD_SECONDS: Final = 10.0
"""Time for which a pod of the gang waits for admission before the elastic nodes leave, if they are too few to
train alone. A pod that its group left behind leaves after the same time. A pod that only replaces another one
is usually admitted before that."""
_SECOND: Final = 1.0
"""Precision of the timestamps by which Kueue preempts the youngest workload first if it needs quota."""


@dataclass(frozen=True)
class Queueing:
    """The decision for the pods of a queued run.

    ``due``: nodes that get a pod now. ``elastic``: nodes that wait for the gang. ``withdrawn``: pods to
    delete without counting a loss, because they never ran or cannot train.
    """

    due: tuple[int, ...]
    gang: Gang | None = None
    elastic: frozenset[int] = frozenset()
    withdrawn: tuple[PodState, ...] = ()
    requeue_after: float | None = None


def decide_queueing(
    context: ReconcileContext, missing: Sequence[int], due: Sequence[int]
) -> Queueing:
    """Decide which of the ``due`` nodes get a pod now, and in which group.

    ``missing``: indices of all nodes without a live pod.
    """
    if context.now < context.memory.come_again_at:
        return Queueing((), withdrawn=context.live)
    queue = context.run.queue
    if not queue:
        return Queueing(tuple(due))
    newest = find_newest_gang(context)
    group = names.queue_group_name(context.run.name, context.run.uid, newest)
    members = [
        pod
        for pod in context.nodes
        if (pod.place.group, pod.place.queue) == (group, queue) and newest >= 0
    ]
    living = [pod for pod in members if pod.place.is_group_alive]
    if living:
        size = living[0].place.group_size or context.run.spec.nodes.min
        gang, wait = _join(context, due, members, Gang(size, newest))
    else:
        # Kueue does not admit an incomplete group. Create all missing nodes below the minimum together,
        # including a node that its last group left behind. A single missing node is admitted alone.
        gang = Gang(context.run.spec.nodes.min, newest + 1)
        nodes = wait = frozenset(index for index in missing if index < gang.minimum)
        is_left_behind = any(pod.place.is_abandoned for pod in context.live)
        if nodes <= frozenset(due) and not is_left_behind:
            wait = frozenset()
            if len(nodes) > 1:
                gang = replace(gang, size=len(nodes), members=nodes)

    # If a node above the minimum were admitted or scheduled first, it could occupy the place of a node below
    # the minimum. Create it at least one second later: of two workloads of the same priority, Kueue preempts
    # the younger.
    below = [pod for pod in context.live if pod.index < gang.minimum]
    has_gang = len({pod.index for pod in below if pod.node_name}) >= gang.minimum
    youngest = max((pod.place.scheduled_at or 0.0 for pod in below), default=0.0)
    is_early = context.now - youngest < _SECOND
    above = frozenset(index for index in missing if index >= gang.minimum)
    waiting = above if is_early or not has_gang else frozenset()

    withdrawn, seconds = _withdraw(context, gang.minimum)
    return Queueing(
        due=tuple(index for index in due if index not in wait | waiting),
        gang=gang,
        elastic=waiting,
        withdrawn=withdrawn,
        requeue_after=_SECOND if has_gang and waiting else seconds,
    )


def joins_pod_group(context: ReconcileContext) -> bool:
    """Return whether nodes that are created now belong to the run's PodGroup.

    A gang scheduler counts the pods of a group. A pod in the group would wait forever for pods that are not
    in the group. If the kind of gang of the installation has changed, the run therefore uses the new kind
    only after none of its pods is live.
    """
    gang = context.config.gang
    is_wanted = gang != "none" and context.run.spec.nodes.min > 1
    return is_wanted and all(pod.gang == gang for pod in context.live)


def find_newest_gang(context: ReconcileContext) -> int:
    """Return the number of the run's newest group, or -1.

    The pods count as well as the status, because an operator may have stopped after creating the pods and
    before writing the status.
    """
    prefix = names.queue_group_name(context.run.name, context.run.uid, 0)[:-1]
    numbers = [
        pod.place.group.removeprefix(prefix)
        for pod in context.nodes
        if pod.place.group.startswith(prefix)
    ]
    # Limit the length, because any client may set a label.
    known = [int(text) for text in numbers if text.isdecimal() and len(text) < 10]
    return max([context.memory.gang, *known])


def is_stranded(pod: PodState, context: ReconcileContext) -> bool:
    """Return whether Kueue holds the pod forever, in no queue or in a queue that the run no longer names."""
    return pod.place.is_stranded(context.run.queue)


def describe_wait(pod: PodState, context: ReconcileContext, where: str) -> str:
    """Return why Kueue holds pods of the run. ``pod``: one of the pods. ``where``: its description."""
    seen, run = context.observation, context.run
    everything = (*seen.preparations, *seen.coordinators, *context.live)
    held = [pod for pod in everything if pod.is_live and pod.place.is_gated]
    who = f"{where} and {len(held) - 1} more wait" if len(held) > 1 else f"{where} waits"
    queue = run.queue or pod.place.queue
    if not queue:
        return (
            f"{who} for a queue: Kueue here manages pods without one, too. Set the label "
            f"{names.LABEL_QUEUE} on the TrainingRun"
        )
    # Nodes that wait may have trained before. A pod's name without the attempt identifies its node.
    last = {}
    for record in context.memory.ends:
        node, _, _ = record.pod.rpartition("-")
        last[node] = record.cause
    waiting = [pod.name.rpartition("-")[0] for pod in held]
    was_preempted = any(last.get(node) == PodCause.PREEMPTED for node in waiting)
    why = ", because they were preempted" if was_preempted else ""
    return f"{who} to be admitted by the queue {queue}{why}"


def _join(
    context: ReconcileContext, due: Sequence[int], members: Sequence[PodState], gang: Gang
) -> tuple[Gang, frozenset[int]]:
    """Return the live group with the nodes that join it now, and the nodes that have to wait.

    ``gang``: the live group, whose minimum is the size of the group.
    """
    size = gang.minimum
    active = [pod for pod in members if pod.place.is_active]
    # Pods without Kueue's finalizer exist if Kueue does not run.
    others = [
        pod
        for pod in members
        if pod.is_live and not pod.place.is_managed and not pod.place.is_abandoned
    ]
    room = size - len(active) - len(others)
    joined: set[int] = set()
    wait: set[int] = set()
    for index in due:
        if index >= size:
            continue
        before = [pod for pod in active if pod.index == index]
        if any(
            not (pod.place.has_terminated or context.is_unreachable(pod)) for pod in before
        ):
            wait.add(index)
        elif room > 0:
            joined.add(index)
            room -= 1
    return replace(gang, size=size, members=frozenset(joined)), frozenset(wait)


def _withdraw(
    context: ReconcileContext, minimum: int
) -> tuple[tuple[PodState, ...], float | None]:
    """Return the pods to delete, and the seconds until more pods may have to be deleted, or None."""
    gated = [pod for pod in context.live if pod.place.is_gated]
    useless = [pod for pod in gated if is_stranded(pod, context)]

    # An abandoned pod joined a group that was already over. Kueue may have ended the group because its pods
    # cannot start. Wait before deleting such pods, so that they are not recreated in a tight loop.
    abandoned = [pod for pod in gated if pod.place.is_abandoned and pod not in useless]
    held = [(pod, pod.created_at) for pod in abandoned]

    # An evicted gang is admitted only if its whole quota is free, and the run's own elastic nodes may use
    # that quota.
    below = [pod.created_at for pod in gated if pod.index < minimum and pod not in useless]
    admitted = sum(not pod.place.is_gated for pod in context.live)
    if below and admitted < context.run.spec.nodes.min:
        above = [pod for pod in context.live if pod.index >= minimum]
        held += [(pod, min(below)) for pod in above if pod not in (*useless, *abandoned)]
    times = {pod: since + HELD_SECONDS - context.now for pod, since in held}
    going = [pod for pod, left in times.items() if left <= 0]
    waits = [left for left in times.values() if left > 0]
    return (*useless, *going), min(waits, default=None)
