"""Builds the pods of a run that prepare data or evaluate.

Such a pod is not a node, but uses a node's image and volume.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import (
    JsonObject,
    build_labels,
    build_metadata,
    build_pod_security,
    build_pull_secrets,
    build_tolerations,
    without_none,
)
from evergrad_operator.core.plan.template import build_coordinator_metadata

_GRACE_SECONDS: Final = 30
"""Time from SIGTERM to SIGKILL. It is enough to record the batch that is being evaluated; finished chunks are
on the volume already."""


@dataclass(frozen=True)
class PodBeside:
    """The parts in which preparation and evaluation pods differ."""

    name: str
    role: str
    attempt: int
    container: JsonObject
    init_containers: Sequence[JsonObject]
    volumes: Sequence[Mapping[str, Any]]
    placement: Mapping[str, Any]


def build_pod_beside(
    run: ParsedRun, memory: Memory, config: Config, beside: PodBeside
) -> JsonObject:
    """Build a pod that prepares data or evaluates, as a JSON object."""
    spec: JsonObject = {
        # The operator replaces an ended pod with a new pod, possibly on another host.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "serviceAccountName": run.spec.template.service_account_name,
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **beside.placement,
        "tolerations": build_tolerations(
            run.spec.template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "initContainers": list(beside.init_containers),
        "containers": [beside.container],
        "volumes": beside.volumes,
    }

    # The pod is not a node, so it does not get the labels with which the template counts or groups nodes. A
    # queue admits it on its own. Our labels come last, so that a template cannot detach a pod from its run.
    metadata = build_metadata(run, beside.name)
    labels, annotations = build_coordinator_metadata(run)
    queue = {key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels}
    metadata["labels"] = {
        **labels,
        **queue,
        **build_labels(run, role=beside.role),
        names.LABEL_ATTEMPT: str(beside.attempt),
    }
    metadata["annotations"] = {
        **annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": without_none(spec),
    }
