"""A pod's place in a queue of Kueue, as labels, gates and finalizer show it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.raw import get_map, get_maps, get_text
from evergrad_operator.core.objects.times import parse_time


@dataclass(frozen=True)
class QueuePlace:
    """The place of one pod.

    ``queue``: the LocalQueue, empty for none. ``group``: the group that Kueue admits together, of
    ``group_size`` pods; empty and 0 for a pod that is admitted alone. ``is_gated``: it waits for Kueue to
    admit it. ``is_managed``: Kueue's finalizer is on it. ``has_terminated``: its phase is Failed or
    Succeeded, which a kubelet reports later than the end of its container. ``is_active``: Kueue counts it as
    a pod of its group, and would delete any above the group's size. ``scheduled_at``: seconds since 1970.
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
        """Whether it has joined a group that Kueue had just finished: it is never admitted."""
        return bool(self.group) and self.is_gated and not self.is_managed

    @property
    def is_group_alive(self) -> bool:
        """Whether Kueue keeps its group for this pod's sake."""
        return bool(self.group) and not self.has_terminated and not self.is_abandoned

    def is_stranded(self, queue: str) -> bool:
        """Whether Kueue holds the pod in no queue, or in another than ``queue``, which its run names by now:
        a pod stays in the one that it was made with.

        A run that names none leaves its pods where they wait: Kueue puts pods without a label into the
        namespace's LocalQueue ``default``, and would put their successors there, too.
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

    # As Kueue counts: a pod that is deleted before it has a host will never run.
    never_runs = metadata.get("deletionTimestamp") is not None and not spec.get("nodeName")
    return QueuePlace(
        queue=get_text(labels, names.LABEL_QUEUE),
        group=get_text(labels, names.LABEL_QUEUE_GROUP),
        # Bounded, because anybody may set an annotation.
        group_size=int(size) if size.isdecimal() and len(size) < 6 else 0,
        is_gated=names.QUEUE_GATE in gates,
        is_managed=is_managed,
        has_terminated=phase in ("Failed", "Succeeded"),
        is_active=is_managed and phase != "Failed" and not never_runs,
        scheduled_at=parse_time(scheduled.get("lastTransitionTime")) if scheduled else None,
    )
