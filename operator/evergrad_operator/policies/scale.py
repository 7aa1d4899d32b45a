"""Which pods a training run should have: one live pod a node, one coordinator, nobody above the bounds."""

from dataclasses import dataclass
from typing import Final

from evergrad_operator.decision import Bounds, PodDeletion
from evergrad_operator.images import pin_image
from evergrad_operator.pods import PodState
from evergrad_operator.policies.context import ReconcileContext
from evergrad_operator.policies.failure import is_backing_off
from evergrad_operator.policies.lifecycle import earliest, remove
from evergrad_operator.policies.record import find_own_record

COORDINATOR_SILENCE_SECONDS: Final = 10.0
"""After so long without an answer a coordinator is replaced: its nodes wait no longer for it either."""


@dataclass(frozen=True)
class Scale:
    """Pods to make and to delete. ``missing``: nodes without a live pod, those that have to wait included.

    ``faulty``: nodes that wait after a host fault, while others do not.
    """

    nodes_to_create: tuple[tuple[int, int], ...]
    pods_to_delete: tuple[PodDeletion, ...]
    coordinator_attempt: int | None
    epoch: int
    bounds: Bounds | None
    missing: int
    faulty: frozenset[int]
    requeue_after: float | None


def decide_scale(context: ReconcileContext) -> Scale:
    """The pods of a run that trains or wants to."""
    most = context.run.spec.nodes.largest
    newest, surplus = _find_newest(context)

    # Which nodes get a pod now, and which have to wait: for the budget, for the last holder of the state, or
    # after a fault of their host.
    missing = [index for index in range(most) if index not in newest]
    is_waiting = is_backing_off(context)
    # Where only a leaving pod may hold the state, a successor, the same node to the coordinator, would cut
    # its save short. A pod on a lost node is not waited for: whatever it holds cannot be reached.
    is_anybody_left = any(other.is_running for other in context.live)
    held = {
        pod.index
        for pod in context.leaving
        if pod.is_running and pod.disruption != "NodeLost" and not is_anybody_left
    }
    faults = context.memory.faults
    faulty = (
        faults.nodes.intersection(missing)
        if context.now < faults.retry_at
        else frozenset[int]()
    )
    due = [] if is_waiting else [index for index in missing if index not in held | faulty]
    # Pods are sorted: the highest attempt of each node comes last.
    visible = {pod.index: pod.attempt for pod in context.nodes}
    coordinator, epoch = _find_coordinator(context)
    # One coordinator: those of earlier epochs go. Nodes take orders of the newest alone, in any case.
    older = [
        pod
        for pod in context.observation.coordinators
        if not pod.is_deleting and pod.attempt < epoch
    ]
    # Its successor is made once it is being deleted: that stands in the API server, whatever becomes of this
    # operator.
    live = context.observation.live_coordinator
    if live is not None and _is_lost(live, context):
        older.append(live)
    return Scale(
        nodes_to_create=tuple(
            (index, 1 + max(visible.get(index, -1), context.memory.attempt_of(index)))
            for index in due
        ),
        pods_to_delete=remove((*surplus, *_find_old(context))) + remove(older),
        coordinator_attempt=coordinator if not is_waiting else None,
        epoch=epoch,
        bounds=_find_bounds(context),
        missing=len(missing),
        faulty=faulty,
        requeue_after=earliest(
            context.memory.budget.retry_at - context.now if is_waiting else None,
            faults.retry_at - context.now if faulty else None,
            context.seconds_to_unreachable if held else None,
        ),
    )


def _find_newest(context: ReconcileContext) -> tuple[dict[int, PodState], list[PodState]]:
    """One live pod a node, the newest, and all that are to go."""
    most, memory = context.run.spec.nodes.largest, context.memory

    # A second pod of a node is there where an operator died between a creation and its
    # note of it.
    newest: dict[int, PodState] = {}
    for pod in context.live:
        known = newest.get(pod.index)
        if known is None or pod.attempt > known.attempt:
            newest[pod.index] = pod
    surplus = [
        pod for pod in context.live if pod.index >= most or newest.get(pod.index) is not pod
    ]
    # A host may not get the image by its digest, as where images are brought by hand: the next pod asks for
    # the tag.
    digest = "" if memory.image_pin else pin_image(memory.image, memory.image_id)
    surplus += [
        pod
        for pod in newest.values()
        if pod.index < most and pod.is_image_missing and digest and pod.image == digest
    ]
    return newest, surplus


def _find_coordinator(context: ReconcileContext) -> tuple[int | None, int]:
    """The attempt to create, None if one is there, and the newest epoch. Epochs only grow, also over a lost
    status.

    The PVC is told before the pod is made, so that its epoch may be one that is still to be made: where the
    status knows of no such pod, or, without a status, where no node followed it.
    """
    live = context.observation.live_coordinator
    if live is not None:
        return None, live.attempt
    own, memory = find_own_record(context), context.memory
    # The next epoch is beyond everything that anybody knows of: pods, status and the volume.
    following = 1 + max((pod.attempt for pod in context.observation.coordinators), default=-1)
    following = max(following, memory.coordinator.attempt + 1)
    if own is not None:
        is_still_to_be_made = own.uid == context.run.uid and (
            memory.is_known or not context.nodes
        )
        following = max(following, own.epoch if is_still_to_be_made else own.epoch + 1)
    return following, following


def _is_lost(coordinator: PodState, context: ReconcileContext) -> bool:
    """Whether a coordinator served, and nothing has come from its host for longer than its nodes wait for it.

    Kubernetes gives up a pod on a dead host after 45 s and more; the next coordinator takes the group over as
    it is. One that has never answered is kept: it may be the operator that cannot reach it. The same holds
    while most others are silent, too.
    """
    silence = context.observation.silence
    if (
        silence is None
        or silence.attempt != coordinator.attempt
        or silence.seconds < COORDINATOR_SILENCE_SECONDS
    ):
        return False
    return silence.has_answered and silence.has_timed_out and silence.is_alone


def _find_old(context: ReconcileContext) -> list[PodState]:
    """Ended pods that a newer ended one of the same node has made useless; the newest stays for its logs."""
    newest: dict[int, PodState] = {}
    for pod in context.nodes:
        if pod.end is not None and (
            pod.index not in newest or pod.attempt > newest[pod.index].attempt
        ):
            newest[pod.index] = pod
    return [
        pod for pod in context.nodes if pod.end is not None and newest[pod.index] is not pod
    ]


def _find_bounds(context: ReconcileContext) -> Bounds | None:
    progress, nodes = context.progress, context.run.spec.nodes
    if progress is None or progress.phase in ("Complete", "Stopped", "Failed"):
        return None
    most = context.run.spec.failure_policy.max_failures_without_progress
    wanted = Bounds(nodes.min, nodes.largest, most)
    # A coordinator of an older release tells of no such number, and is not asked for it.
    told = Bounds(
        progress.min_nodes,
        progress.max_nodes,
        most if progress.max_failures is None else progress.max_failures,
    )
    return None if told == wanted else wanted
