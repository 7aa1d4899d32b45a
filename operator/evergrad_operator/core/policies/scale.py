"""The pods that a training run should have: one live pod a node, one coordinator, none above the bounds."""

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
"""Silence after which a coordinator is replaced: its nodes wait no longer for it either."""


@dataclass(frozen=True)
class Scale:
    """Pods to make and to delete. ``missing``: nodes without a live pod, those that have to wait included,
    but for those that wait for the gang.

    ``faulty``: nodes that wait after a host fault, while others do not. ``withdrawn``: nodes whose pods go
    once the status shows that their end counts for nothing.
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
    # Ended pods that a newer ended one of the same node has made useless go, too; the newest stays for its
    # logs. Pods are sorted: the highest attempt of each node comes last.
    ended = [pod for pod in context.nodes if pod.end is not None]
    newest_ended = {pod.index: pod for pod in ended}
    surplus += [pod for pod in ended if newest_ended[pod.index] is not pod]

    # Which nodes get a pod now, and which have to wait: for the budget, for the last holder of the state, or
    # after a fault of their host.
    missing = [
        index for index in range(context.run.spec.nodes.largest) if index not in newest
    ]
    is_waiting = is_backing_off(context)
    # The same node to the coordinator: a successor would cut the save of the last holder short.
    held = context.last_holders
    faults = context.memory.faults
    is_faulty = context.now < faults.retry_at
    faulty = faults.nodes.intersection(missing if is_faulty else ())
    due = [] if is_waiting else [index for index in missing if index not in held | faulty]

    # A queue admits some nodes together, and others only after them. The end of a pod that goes for that
    # reason is counted before it comes, or it would look like a loss.
    queueing, known = decide_queueing(context, missing, due), context.observation.status
    leaving = queueing.withdrawn
    counted = [pod for pod in leaving if known.has_recorded(pod.index, pod.attempt)]
    surplus += [pod for pod in counted if pod not in surplus]
    withdrawn = frozenset(pod.index for pod in leaving if pod not in counted)

    # An attempt is beyond all that are known, so that no name is used twice.
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
    """Return the bounds that the coordinator has to be sent; None where it has them, or its group is over."""
    progress, nodes = context.progress, context.run.spec.nodes
    if progress is None or progress.phase in ("Complete", "Stopped", "Failed"):
        return None
    # A coordinator of an older release reports no number of failures, and gets none for that reason alone.
    most = context.run.spec.failure_policy.max_failures_without_progress
    failures = most if progress.max_failures is None else progress.max_failures
    wanted = NodeBounds(nodes.min, nodes.largest, most)
    is_known = wanted == NodeBounds(progress.min_nodes, progress.max_nodes, failures)
    return None if is_known else wanted


def find_epoch(context: ReconcileContext) -> int:
    """Return the epoch of the coordinator that serves, or of the next one."""
    return _find_coordinators(context)[1]


def _find_newest(context: ReconcileContext) -> tuple[dict[int, PodState], list[PodState]]:
    """Return the newest live pod of each node, and the live pods that are to go."""
    most, memory = context.run.spec.nodes.largest, context.memory

    # A second pod of a node is there where an operator died between its creation and the status write.
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
    """Whether its host cannot get the image by the digest, as where images are brought by hand: the next pod
    asks for the tag."""
    digest = "" if memory.image_pin else pin_image(memory.image, memory.image_id)
    return bool(digest) and pod.is_image_missing and pod.waiting_image == digest


def _find_coordinators(
    context: ReconcileContext,
) -> tuple[int | None, int, list[PodState]]:
    """Return the attempt to create, None if one is there, the newest epoch, and the coordinators that go.

    Epochs only grow, also over a lost status.
    """
    live = context.observation.live_coordinator
    attempt: int | None = None
    if live is not None:
        epoch = live.attempt
    else:
        own, memory = find_own_record(context), context.memory
        # The next epoch is beyond all that are known: by pods, status and the volume.
        known = max((pod.attempt for pod in context.observation.coordinators), default=-1)
        epoch = 1 + max(known, memory.coordinator.attempt)
        # The epoch is written to the PVC before the pod is made. After a crash between the two, the PVC names
        # an epoch that no pod has had: it is used if the status lists no such pod, or, without a status, if
        # no node carries it.
        if own is not None:
            is_ours = own.uid == context.run.uid
            is_still_to_be_made = is_ours and (memory.is_known or not context.nodes)
            epoch = max(epoch, own.epoch if is_still_to_be_made else own.epoch + 1)
        attempt = epoch

    # Coordinators of earlier epochs go; nodes obey only the newest in any case.
    older = [
        pod
        for pod in context.observation.coordinators
        if not pod.is_deleting and pod.attempt < epoch
    ]
    # One that Kueue holds in no queue, or in one that the run has left for another, is made again there.
    # As with nodes, the status shows first that its end counts for nothing.
    noted = context.observation.status.coordinator
    is_noted = noted.is_queued and noted.is_recorded and noted.attempt == epoch
    if live is not None and context.observation.is_coordinator_stranded and is_noted:
        older.append(live)
        return attempt, epoch, older

    # The live one is lost if it has served, and its host is silent for longer than its nodes wait for it:
    # Kubernetes gives up a pod on a dead host after 45 s and more. Its successor, which takes the group over
    # as it is, is made only once it is being deleted: the API server keeps the deletion, whatever becomes of
    # this operator. One that has never answered is kept: it may be the operator that cannot reach it. The
    # same holds while most others are silent, too.
    silence = context.observation.silence
    if (
        live is not None
        and silence is not None
        and silence.attempt == live.attempt
        and silence.seconds >= COORDINATOR_SILENCE_SECONDS
        and silence.has_answered
        and silence.has_timed_out
        and silence.is_alone
    ):
        older.append(live)
    return attempt, epoch, older
