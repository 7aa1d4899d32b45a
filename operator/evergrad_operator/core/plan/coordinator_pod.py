"""Builds the pod of a run's coordinator, which decides which nodes train."""

from dataclasses import dataclass

from evergrad_common.contract import build_soft_limit
from evergrad_manifest.envelope.resources import Resources
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import (
    JsonObject,
    build_container_security,
    build_labels,
    build_metadata,
    build_pod_security,
    build_pull_secrets,
    build_scrape_annotations,
    build_tolerations,
    without_none,
)
from evergrad_operator.core.plan.node_pod import grace_seconds
from evergrad_operator.core.plan.resources import bound_disk, build_resources
from evergrad_operator.core.plan.template import (
    build_coordinator_metadata,
    build_coordinator_placement,
)
from evergrad_operator.core.plan.token import (
    build_token_arguments,
    build_token_mount,
    build_token_volume,
)

_STATE_SIZE = "16Mi"
"""Size limit of the coordinator's state volume, which contains one small file."""
_MARGIN_SECONDS = 20
"""Additional time for which the coordinator waits for a leaving node, after the node's grace period."""
_LINGER_SECONDS = 10**8
"""Time for which the coordinator stays after the run's end. The operator reads the outcome and deletes the
pod."""


@dataclass(frozen=True)
class Epoch:
    """One coordinator pod in the life of a run.

    ``expect``: number of nodes to wait for at the start. ``nothing_runs``: whether no earlier group can be
    running, so that the coordinator does not wait for one.
    """

    attempt: int
    expect: int
    nothing_runs: bool = False


def build_coordinator_pod(
    run: ParsedRun,
    memory: Memory,
    config: Config,
    epoch: Epoch,
    *,
    token: str,
) -> JsonObject:
    """Build the pod of one coordinator. ``token``: the run's token."""
    template = run.spec.template
    metadata = build_metadata(run, names.coordinator_pod_name(run.name, epoch.attempt))
    labels, annotations = build_coordinator_metadata(run)
    ours = {
        **build_labels(run, role=names.ROLE_COORDINATOR),
        names.LABEL_ATTEMPT: str(epoch.attempt),
    }
    # Put the coordinator into the queue only if Kueue holds all pods without a queue, because it uses quota
    # even while its nodes wait. It is never in the nodes' group, because it outlives the group.
    queue = {}
    if memory.coordinator.is_queued:
        queue = {
            key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels
        }
    # Our labels come last, so that a template cannot detach a pod from its run.
    metadata["labels"] = {**labels, **queue, **ours}
    # Add no scrape annotations if the network policies block access to coordinators. The target would always
    # be down.
    is_reached = bool(config.metrics_from) or not config.network_policies
    metadata["annotations"] = {
        **build_scrape_annotations(names.STATUS_PORT if is_reached else 0, config),
        **annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    spec: JsonObject = {
        # A coordinator that crashes restarts from its state. If its pod is lost, the operator creates a
        # coordinator with a higher epoch.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **build_coordinator_placement(run),
        "tolerations": build_tolerations(
            template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "containers": [_build_container(run, memory, config, epoch)],
        "volumes": [
            {"name": "evergrad-state", "emptyDir": {"sizeLimit": _STATE_SIZE}},
            build_token_volume(run, token),
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": without_none(spec),
    }


def _build_container(
    run: ParsedRun, memory: Memory, config: Config, epoch: Epoch
) -> JsonObject:
    """Build the coordinator's container, with its arguments."""
    nodes = run.spec.nodes
    arguments = [
        *("--run", run.name),
        *("--min", str(nodes.min)),
        *("--max", str(nodes.largest)),
        *("--expect", str(epoch.expect)),
        *("--port", str(names.JOIN_PORT)),
        *("--status-port", str(names.STATUS_PORT)),
        *("--state", f"{names.STATE_PATH}/generation"),
        *build_token_arguments(),
        *("--epoch", str(epoch.attempt)),
        *(("--nothing-runs",) if epoch.nothing_runs else ()),
        *("--recovery", run.parsed.recovery),
        *("--max-failures", str(run.spec.failure_policy.max_failures_without_progress)),
        # The coordinator waits slightly longer for a leaving node than the node's grace period.
        *build_soft_limit(grace_seconds(run) + _MARGIN_SECONDS),
        *("--linger", str(_LINGER_SECONDS)),
    ]
    requests = {"cpu": config.coordinator_cpu, "memory": config.coordinator_memory}
    limits = {
        "cpu": config.coordinator_cpu_limit,
        "memory": config.coordinator_memory_limit,
    }
    resources = bound_disk(
        Resources.model_construct(requests=requests, limits=limits),
        config.coordinator_ephemeral_storage,
        config.coordinator_ephemeral_storage_limit,
    )
    return {
        "name": names.CONTAINERS[names.ROLE_COORDINATOR],
        "image": memory.coordinator.image or config.operator_image,
        "imagePullPolicy": config.operator_image_pull_policy,
        "command": ["python", "-m", "evergrad_coordinator"],
        "args": arguments,
        "ports": [
            {"name": "join", "containerPort": names.JOIN_PORT, "protocol": "TCP"},
            {"name": "status", "containerPort": names.STATUS_PORT, "protocol": "TCP"},
        ],
        # A coordinator that hangs blocks the whole run, so the kubelet restarts it after one minute.
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "status"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": build_resources(resources),
        "securityContext": build_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "evergrad-state", "mountPath": names.STATE_PATH},
            build_token_mount(),
        ],
    }
