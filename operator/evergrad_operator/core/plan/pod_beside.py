"""A pod of a run that is no node, and has a node's image and volume: it prepares data, or evaluates."""

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
"""Time from SIGTERM to the end: finished chunks are on the volume already, and a batch that is being measured
is written down in it."""


@dataclass(frozen=True)
class PodBeside:
    """Parts in which such pods of a run differ."""

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
    """Build the pod."""
    spec: JsonObject = {
        # One that ends is replaced by a new pod, perhaps on another host.
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

    # It is no node: labels by which the template counts or groups nodes are not for it. A queue admits it
    # alone. Ours come last: a template must not take a pod out of its run.
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
