"""Decides on the pods of a training run: one live pod per node, one coordinator, and no pods above the
bounds."""

from dataclasses import dataclass
from typing import Final

from evergrad_operator.core.decision import Gang, NodeBounds, PodDeletion
from evergrad_operator.core.objects.images import pin_image
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.failure import is_backing_off
from evergrad_operator.core.policies.gang import decide_queueing
from evergrad_operator.core.policies.lifecycle import earliest, remove
from evergrad_operator.core.policies.record import find_own_record

COORDINATOR_SILENCE_SECONDS: Final = 10.0
"""Time without an answer after which a coordinator is replaced. Its nodes wait for the same time."""


@dataclass(frozen=True)
class Scale:
    """The pods to create and to delete.

    ``missing``: number of nodes without a live pod, including nodes that have to wait, but without nodes that
    wait for the gang. ``faulty``: nodes that wait after a host fault. ``withdrawn``: nodes whose pods are
    deleted after the status shows that their ends are not counted.
    """

    nodes_to_create: tuple[tuple[int, int], ...]
    pods_to_delete: tuple[PodDeletion, ...]
    coordinator_attempt: int | None
    epoch: int
    bounds: NodeBounds | None
    missing: int
    faulty: frozenset[int]
    gang: Gang | None
    withdrawn: frozenset[int]
    requeue_after: float | None


def decide_scale(context: ReconcileContext) -> Scale:
    """Decide on the pods of a run that trains or wants to."""
    newest, surplus = _find_newest(context)
    # Delete all ended pods of a node except the newest, which stays for its logs. The pods are sorted; the
    # highest attempt of each node comes last.
    ended = [pod for pod in context.nodes if pod.end is not None]
    newest_ended = {pod.index: pod for pod in ended}
    surplus += [pod for pod in ended if newest_ended[pod.index] is not pod]

    # Decide which nodes get a pod now, and which nodes wait: for the budget, for the last holder of the
    # state, or after a host fault.
    missing = [
        index for index in range(context.run.spec.nodes.largest) if index not in newest
    ]
    is_waiting = is_backing_off(context)
    # Do not replace the last holder yet. To the coordinator a new pod is the same node, and would interrupt
    # the save.
    held = context.last_holders
    faults = context.memory.faults
    is_faulty = context.now < faults.retry_at
    faulty = faults.nodes.intersection(missing if is_faulty else ())
    due = [] if is_waiting else [index for index in missing if index not in held | faulty]

    # A queue admits some nodes together, and other nodes only after them. Record the end of a pod that is
    # withdrawn for this reason before deleting it. Otherwise its end would count as a loss.
    queueing, known = decide_queueing(context, missing, due), context.observation.status
    leaving = queueing.withdrawn
    counted = [pod for pod in leaving if known.has_recorded(pod.index, pod.attempt)]
    surplus += [pod for pod in counted if pod not in surplus]
    withdrawn = frozenset(pod.index for pod in leaving if pod not in counted)

    # Use an attempt above all known attempts, so that no name is used twice.
    visible = {pod.index: pod.attempt for pod in context.nodes}
    nodes_to_create = tuple(
        (index, 1 + max(visible.get(index, -1), context.memory.attempt_of(index)))
        for index in queueing.due
    )

    coordinator, epoch, older = _find_coordinators(context)
    return Scale(
        nodes_to_create=nodes_to_create,
        pods_to_delete=remove(surplus) + remove(older),
        coordinator_attempt=coordinator if not is_waiting else None,
        epoch=epoch,
        bounds=_find_bounds(context),
        missing=len(missing) - len(queueing.elastic),
        faulty=faulty,
        gang=queueing.gang,
        withdrawn=withdrawn,
        requeue_after=earliest(
            context.memory.budget.retry_at - context.now if is_waiting else None,
            faults.retry_at - context.now if faulty else None,
            context.seconds_to_unreachable if held or queueing.gang else None,
            queueing.requeue_after,
            1.0 if withdrawn or context.observation.is_coordinator_stranded else None,
        ),
    )


def _find_bounds(context: ReconcileContext) -> NodeBounds | None:
    """Return the bounds to send to the coordinator; None if it has them already or its group is over."""
    progress, nodes = context.progress, context.run.spec.nodes
    if progress is None or progress.phase in ("Complete", "Stopped", "Failed"):
        return None
    # A coordinator of an older release reports no number of failures. Do not send bounds only for that
    # reason.
    most = context.run.spec.failure_policy.max_failures_without_progress
    failures = most if progress.max_failures is None else progress.max_failures
    wanted = NodeBounds(nodes.min, nodes.largest, most)
    is_known = wanted == NodeBounds(progress.min_nodes, progress.max_nodes, failures)
    return None if is_known else wanted


def find_epoch(context: ReconcileContext) -> int:
    """Return the epoch of the live coordinator; if there is none, of the next coordinator."""
    return _find_coordinators(context)[1]


def _find_newest(context: ReconcileContext) -> tuple[dict[int, PodState], list[PodState]]:
    """Return the newest live pod of each node, and the live pods to delete."""
    most, memory = context.run.spec.nodes.largest, context.memory

    # A node has a second pod if an operator stopped after creating the pod and before writing the status.
    newest: dict[int, PodState] = {}
    for pod in context.live:
        known = newest.get(pod.index)
        if known is None or pod.attempt > known.attempt:
            newest[pod.index] = pod
    surplus = [
        pod for pod in context.live if pod.index >= most or newest.get(pod.index) is not pod
    ]
    surplus += [
        pod
        for pod in newest.values()
        if pod.index < most and is_digest_missing(pod, memory)
    ]
    return newest, surplus


def is_digest_missing(pod: PodState, memory: Memory) -> bool:
    """Return whether the pod's host cannot pull the image by digest.

    For example, the image was loaded onto the host by hand. The next pod then uses the tag.
    """
    digest = "" if memory.image_pin else pin_image(memory.image, memory.image_id)
    return bool(digest) and pod.is_image_missing and pod.waiting_image == digest


def _find_coordinators(
    context: ReconcileContext,
) -> tuple[int | None, int, list[PodState]]:
    """Return the attempt to create, the newest epoch, and the coordinators to delete.

    The attempt is None if there is a live coordinator. Epochs never decrease, even if the status is lost.
    """
    live = context.observation.live_coordinator
    epoch = _find_next_epoch(context) if live is None else live.attempt

    # Delete coordinators of earlier epochs. Nodes accept only the newest coordinator in any case.
    older = [
        pod
        for pod in context.observation.coordinators
        if not pod.is_deleting and pod.attempt < epoch
    ]
    if live is not None and _is_replaced(context, live):
        older.append(live)
    return epoch if live is None else None, epoch, older


def _find_next_epoch(context: ReconcileContext) -> int:
    """Return the epoch of the coordinator to create."""
    # The next epoch is above all epochs in pods, the status and the record on the volume.
    own, memory = find_own_record(context), context.memory
    known = max((pod.attempt for pod in context.observation.coordinators), default=-1)
    epoch = 1 + max(known, memory.coordinator.attempt)
    if own is None:
        return epoch
    # The epoch is written to the PVC before the pod is created. If the operator stops in between, the PVC
    # has an epoch without a pod. Use that epoch if the status is known, or if there are no nodes.
    is_ours = own.uid == context.run.uid
    is_still_to_be_made = is_ours and (memory.is_known or not context.nodes)
    return max(epoch, own.epoch if is_still_to_be_made else own.epoch + 1)


def _is_replaced(context: ReconcileContext, live: PodState) -> bool:
    """Return whether the live coordinator is deleted, so that another one is created."""
    # Recreate a coordinator that Kueue holds in no queue or in a queue that the run no longer names. As with
    # nodes, first record in the status that its end is not counted.
    noted = context.observation.status.coordinator
    is_noted = noted.is_queued and noted.is_recorded and noted.attempt == live.attempt
    if context.observation.is_coordinator_stranded and is_noted:
        return True

    # Replace the coordinator if it has answered before and its host has been silent for longer than its
    # nodes wait. Kubernetes itself gives up a pod on a dead host only after 45 s or more. The new
    # coordinator, which takes over the group, is created only after the deletion has started: the API server
    # keeps the deletion even if this operator stops. Keep a coordinator that has never answered, or if most
    # other coordinators are silent too, because the operator's network may be the cause.
    silence = context.observation.silence
    return (
        silence is not None
        and silence.attempt == live.attempt
        and silence.seconds >= COORDINATOR_SILENCE_SECONDS
        and silence.has_answered
        and silence.has_timed_out
        and silence.is_alone
    )
