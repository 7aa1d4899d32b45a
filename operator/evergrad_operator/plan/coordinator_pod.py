"""The pod of a run's coordinator: the only authority on who trains."""

from evergrad_coordinator.contract import build_soft_limit
from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.memory import Memory
from evergrad_operator.plan.common import (
    JsonObject,
    build_container_security,
    build_labels,
    build_metadata,
    build_pod_security,
    build_pull_secrets,
    build_tolerations,
    without_none,
)
from evergrad_operator.plan.node_pod import grace_seconds
from evergrad_operator.plan.token import build_token_arguments, build_token_mount, build_token_volume
from evergrad_operator.spec import TrainingRun

_MARGIN_SECONDS = 20
"""From the time when a node leaves alone to the coordinator's end of patience."""
_LINGER_SECONDS = 10**8
"""It stays after the end, so that the operator can read how the run ended, until the operator deletes it."""


def build_coordinator_pod(
    run: TrainingRun, memory: Memory, config: Config, *, attempt: int, expect: int, token: str
) -> JsonObject:
    """The coordinator in its ``attempt``, which waits for ``expect`` nodes at the start."""
    template = run.spec.template
    metadata = build_metadata(run, names.coordinator_pod_name(run.name, attempt))
    metadata["labels"] = {**build_labels(run, role=names.ROLE_COORDINATOR), names.LABEL_ATTEMPT: str(attempt)}
    metadata["annotations"] = {names.ANNOTATION_RESTART: str(memory.restart)}
    spec: JsonObject = {
        # A coordinator that crashes goes on from its state; one whose pod is lost is replaced by one of a higher epoch.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": 5,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        "priorityClassName": template.priority_class_name,
        "tolerations": build_tolerations(template.tolerations, config.node_loss_toleration_seconds),
        "imagePullSecrets": build_pull_secrets(run, config),
        "containers": [_build_container(run, memory, config, attempt=attempt, expect=expect)],
        "volumes": [{"name": "evergrad-state", "emptyDir": {}}, build_token_volume(run, token)],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": without_none(spec)}


def _build_container(run: TrainingRun, memory: Memory, config: Config, *, attempt: int, expect: int) -> JsonObject:
    return {
        "name": names.CONTAINERS[names.ROLE_COORDINATOR],
        "image": memory.coordinator.image or config.operator_image,
        "imagePullPolicy": config.operator_image_pull_policy,
        "command": ["python", "-m", "evergrad_coordinator"],
        "args": _build_arguments(run, attempt=attempt, expect=expect),
        "ports": [
            {"name": "join", "containerPort": names.JOIN_PORT, "protocol": "TCP"},
            {"name": "status", "containerPort": names.STATUS_PORT, "protocol": "TCP"},
        ],
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": "status"},
            "initialDelaySeconds": 10,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": {
            "requests": {"cpu": config.coordinator_cpu, "memory": config.coordinator_memory},
            "limits": {"cpu": config.coordinator_cpu_limit, "memory": config.coordinator_memory_limit},
        },
        "securityContext": build_container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "evergrad-state", "mountPath": names.STATE_PATH}, build_token_mount()],
    }


def _build_arguments(run: TrainingRun, *, attempt: int, expect: int) -> list[str]:
    nodes = run.spec.nodes
    return [
        *("--run", run.name),
        *("--min", str(nodes.min)),
        *("--max", str(nodes.max)),
        *("--expect", str(expect)),
        *("--port", str(names.JOIN_PORT)),
        *("--status-port", str(names.STATUS_PORT)),
        *("--state", f"{names.STATE_PATH}/generation"),
        *build_token_arguments(),
        *("--epoch", str(attempt)),
        *("--recovery", run.recovery),
        *("--max-failures", str(run.spec.failure_policy.max_failures_without_progress)),
        *build_soft_limit(grace_seconds(run) + _MARGIN_SECONDS),
        *("--linger", str(_LINGER_SECONDS)),
    ]
