"""The PodGroup of a run, by which a gang scheduler places its nodes together or not at all."""

from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.kinds import POD_GROUPS, Kind
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata

COSCHEDULING: Final = "coscheduling"
_FIXED: Final = "scheduling.k8s.io/v1alpha2"
"""The version whose groups cannot change: Kubernetes 1.36."""


def build_pod_group(
    run: ParsedRun, kind: Kind, *, priority_class: str, restart: int
) -> JsonObject:
    """Build the group. All nodes of the run are in it, and ``nodes.min`` of them have to find a host at once;
    those above the minimum then come one by one.

    ``priority_class``: of the nodes' pods, empty for none. ``restart``: of the run, when the group was made.
    """
    least = run.spec.nodes.min
    # The name of the run, as pods have had it in their label where the group was the user's.
    metadata = build_metadata(run, run.name)
    spec: dict[str, Any] = {"minMember": least}
    if is_of_kubernetes(kind):
        spec = {"schedulingPolicy": {"gang": {"minCount": least}}}
        metadata["annotations"] = {names.ANNOTATION_RESTART: str(restart)}
        if priority_class:
            # Kubernetes' scheduler places no pod whose priority is not its group's.
            spec["priorityClassName"] = priority_class
            metadata["annotations"][names.ANNOTATION_GROUP_PRIORITY] = priority_class
    return {
        "apiVersion": kind.version,
        "kind": kind.kind,
        "metadata": metadata,
        "spec": spec,
    }


def is_of_kubernetes(kind: Kind) -> bool:
    """Whether this is Kubernetes' own PodGroup."""
    return kind not in POD_GROUPS[COSCHEDULING]


def is_fixed(kind: Kind) -> bool:
    """Whether a group of this version keeps the minimum that it was made with."""
    return kind.version == _FIXED
