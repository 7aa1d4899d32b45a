"""Builds the PodGroup of a run, with which a gang scheduler places its nodes together or not at all."""

from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.kinds import POD_GROUPS, Kind
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, build_metadata

COSCHEDULING: Final = "coscheduling"
_FIXED: Final = "scheduling.k8s.io/v1alpha2"
"""API version whose PodGroups cannot change (Kubernetes 1.36)."""


def build_pod_group(
    run: ParsedRun, kind: Kind, *, priority_class: str, restart: int
) -> JsonObject:
    """Build the PodGroup of all nodes of the run.

    ``nodes.min`` nodes must find hosts at the same time; further nodes are placed one by one.
    ``priority_class``: priority class of the nodes' pods; empty for none. ``restart``: restart of the run at
    which the group is created.
    """
    least = run.spec.nodes.min
    # Use the run's name, which pods also have in their label if the user created the group.
    metadata = build_metadata(run, run.name)
    spec: dict[str, Any] = {"minMember": least}
    if is_of_kubernetes(kind):
        spec = {"schedulingPolicy": {"gang": {"minCount": least}}}
        metadata["annotations"] = {names.ANNOTATION_RESTART: str(restart)}
        if priority_class:
            # The Kubernetes scheduler places a pod only if its priority equals the priority of its group.
            spec["priorityClassName"] = priority_class
            metadata["annotations"][names.ANNOTATION_GROUP_PRIORITY] = priority_class
    return {
        "apiVersion": kind.version,
        "kind": kind.kind,
        "metadata": metadata,
        "spec": spec,
    }


def is_of_kubernetes(kind: Kind) -> bool:
    """Return whether this is the PodGroup kind of Kubernetes and not of scheduler-plugins."""
    return kind not in POD_GROUPS[COSCHEDULING]


def is_fixed(kind: Kind) -> bool:
    """Return whether the minimum of a PodGroup of this version cannot change."""
    return kind.version == _FIXED
