"""Parses a pod's place in a queue of Kueue from its labels, gates and finalizers. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.raw import get_map, get_maps, get_text
from evergrad_operator.core.objects.times import parse_time


@dataclass(frozen=True)
class QueuePlace:
    """The place of one pod.

    ``queue``: the LocalQueue (may be empty). ``group``, ``group_size``: the group that Kueue admits together;
    empty and 0 for a pod that is admitted alone. ``is_gated``: the pod waits until Kueue admits it.
    ``is_managed``: the pod has Kueue's finalizer. ``has_terminated``: the pod's phase is Failed or Succeeded,
    which the kubelet reports later than the end of the container. ``is_active``: Kueue counts the pod as a
    member of its group. Kueue deletes active pods above the group's size. ``scheduled_at``: seconds since
    1970.
    """

    queue: str = ""
    group: str = ""
    group_size: int = 0
    is_gated: bool = False
    is_managed: bool = False
    has_terminated: bool = False
    is_active: bool = False
    scheduled_at: float | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether the pod joined a group that Kueue had already finished, so that it is never admitted."""
        return bool(self.group) and self.is_gated and not self.is_managed

    @property
    def is_group_alive(self) -> bool:
        """Whether Kueue keeps the pod's group because of this pod."""
        return bool(self.group) and not self.has_terminated and not self.is_abandoned

    def is_stranded(self, queue: str) -> bool:
        """Return whether Kueue holds the pod in another queue than ``queue``, or in no queue.

        ``queue``: the queue that the run names now; a pod stays in the queue with which it was created. If
        the run names no queue, the result is False: Kueue puts pods without a label into the namespace's
        LocalQueue ``default``, and would put their replacements there, too.
        """
        return bool(queue) and self.is_gated and self.queue != queue


def parse_place(raw: Mapping[str, Any]) -> QueuePlace:
    """Parse the place of a pod."""
    metadata, spec, status = (get_map(raw, key) for key in ("metadata", "spec", "status"))
    labels, annotations = get_map(metadata, "labels"), get_map(metadata, "annotations")
    size = get_text(annotations, names.ANNOTATION_QUEUE_GROUP_SIZE)
    gates = [get_text(gate, "name") for gate in get_maps(spec, "schedulingGates")]
    finalizers = metadata.get("finalizers")
    is_managed = (
        isinstance(finalizers, (list, tuple)) and names.QUEUE_FINALIZER in finalizers
    )
    phase = status.get("phase")
    scheduled = next(
        (
            one
            for one in get_maps(status, "conditions")
            if one.get("type") == "PodScheduled" and one.get("status") == "True"
        ),
        None,
    )

    # Count as Kueue does: a pod that is deleted before it has a host never runs.
    never_runs = metadata.get("deletionTimestamp") is not None and not spec.get("nodeName")
    return QueuePlace(
        queue=get_text(labels, names.LABEL_QUEUE),
        group=get_text(labels, names.LABEL_QUEUE_GROUP),
        # Limit the length, because any client may set an annotation.
        group_size=int(size) if size.isdecimal() and len(size) < 6 else 0,
        is_gated=names.QUEUE_GATE in gates,
        is_managed=is_managed,
        has_terminated=phase in ("Failed", "Succeeded"),
        is_active=is_managed and phase != "Failed" and not never_runs,
        scheduled_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled else None,
    )
