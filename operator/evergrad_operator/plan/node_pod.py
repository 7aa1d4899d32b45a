"""The pod of one node: it trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_coordinator import contract
from evergrad_manifest.envelope.resources import Resources
from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.decision import Gang
from evergrad_operator.memory import Memory
from evergrad_operator.plan.common import (
    JsonObject,
    build_container_security,
    build_labels,
    build_metadata,
    build_pod_security,
    build_pull_secrets,
    build_tolerations,
    escape,
    without_none,
)
from evergrad_operator.plan.template import build_scheduling, build_user_labels, merge_env
from evergrad_operator.plan.token import (
    build_token_arguments,
    build_token_mount,
    build_token_volume,
)
from evergrad_operator.spec import TrainingRun

GRACE_SECONDS: Final = 30
"""Time from SIGTERM to the end of a pod, where neither the run nor its script sets one."""
_MARGIN_SECONDS: Final = 5
"""Time for the supervisor to end after its workers, before the kubelet kills it."""
_CACHES: Final = {
    "HOME": "/tmp",
    "USER": "evergrad",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "HF_HOME": "/tmp/.cache/huggingface",
    "MPLCONFIGDIR": "/tmp/.cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/torchinductor",
    "TRITON_CACHE_DIR": "/tmp/.cache/triton",
}
"""Environment of a user without a name or home, on a root file system that cannot be written."""


@dataclass(frozen=True)
class Node:
    """The node of a run that a pod is to be.

    ``is_on_one_host``: whether all of the run's pods must be on the same host. ``gang``: of a run in a queue.
    """

    index: int
    attempt: int
    is_on_one_host: bool = False
    gang: Gang | None = None


def build_node_pod(
    run: TrainingRun, memory: Memory, config: Config, node: Node, *, token: str
) -> JsonObject:
    """Build the pod of one node. ``token``: the run's."""
    template, grace = run.spec.template, grace_seconds(run)
    arguments = _build_arguments(run, config, index=node.index, grace=grace)
    port = metrics_port(run)
    ports = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}] if port else []
    pod: JsonObject = {
        # A node that ends is replaced by a new pod, perhaps on another host: a restart in place would keep
        # it on a broken one.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace + _MARGIN_SECONDS,
        "automountServiceAccountToken": False,
        # A namespace with many Services would give each pod as many variables.
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **build_scheduling(
            run, is_on_one_host=node.is_on_one_host, avoided=memory.faults.avoided
        ),
        "tolerations": build_tolerations(
            template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "containers": [
            build_trainer_container(
                run, memory, config, run.spec.resources, arguments=arguments, ports=ports
            )
        ],
        "volumes": build_trainer_volumes(run, config, token=token),
    }

    # Ours come last: a template must not take a pod out of its run.
    metadata = build_metadata(run, names.node_pod_name(run.name, node.index, node.attempt))
    queue_labels, queue_annotations = _build_queue(run, node)
    metadata["labels"] = {
        **build_user_labels(run),
        **queue_labels,
        **build_labels(run, role=names.ROLE_NODE),
        names.LABEL_INDEX: str(node.index),
        names.LABEL_ATTEMPT: str(node.attempt),
    }
    metadata["annotations"] = {
        **template.annotations,
        **queue_annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": without_none(pod)}


def build_trainer_volumes(
    run: TrainingRun, config: Config, *, token: str
) -> list[Mapping[str, Any]]:
    """Build the volumes that ``build_trainer_container`` mounts."""
    shared_memory = without_none({"medium": "Memory", "sizeLimit": config.shared_memory_size})
    return [
        {"name": "evergrad-volume", "persistentVolumeClaim": {"claimName": run.claim_name}},
        {"name": "evergrad-config", "configMap": {"name": names.config_name(run.name)}},
        {"name": "evergrad-tmp", "emptyDir": {}},
        {"name": "evergrad-shm", "emptyDir": shared_memory},
        build_token_volume(run, token),
        *run.spec.template.volumes,
    ]


def build_trainer_container(
    run: TrainingRun,
    memory: Memory,
    config: Config,
    resources: Resources,
    *,
    arguments: list[str],
    ports: list[JsonObject],
) -> JsonObject:
    """Build a container of the trainer's image, which runs ``evergrad`` with these arguments."""
    spec = run.spec
    # The root file system cannot be written: everything that libraries cache goes to /tmp.
    env = merge_env(_CACHES, spec.template.env)
    return without_none(
        {
            "name": names.CONTAINERS[names.ROLE_NODE],
            "image": memory.image_pin or memory.image,
            "imagePullPolicy": spec.image_pull_policy or config.image_pull_policy,
            "command": ["evergrad"],
            "args": arguments,
            "env": [
                {
                    "name": "EVERGRAD_POD_IP",
                    "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                },
                *env,
            ],
            "ports": ports,
            "resources": without_none(
                {"requests": dict(resources.requests), "limits": dict(resources.limits)}
            ),
            # Devices are asked for by their limits; requests of them alone are refused.
            "securityContext": build_container_security(
                locks_memory=any(name in run.profile.rdma for name in resources.limits)
            ),
            "terminationMessagePath": names.TERMINATION_LOG,
            # A process that was killed leaves no message: the end of its log stands in for it.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "evergrad-volume", "mountPath": contract.VOLUME_PATH},
                {
                    "name": "evergrad-config",
                    "mountPath": contract.CONFIG_PATH,
                    "readOnly": True,
                },
                build_token_mount(),
                {"name": "evergrad-tmp", "mountPath": "/tmp"},
                {"name": "evergrad-shm", "mountPath": "/dev/shm"},
                *spec.template.volume_mounts,
            ],
        }
    )


def _build_arguments(run: TrainingRun, config: Config, *, index: int, grace: int) -> list[str]:
    """Build the arguments of ``evergrad``: the node of this index, on the run's volume."""
    host = f"{names.coordinator_service_name(run.name)}.{run.namespace}.{config.cluster_domain or 'svc'}"
    # The kubelet would replace ``$(NAME)`` in the folder's name.
    folder = escape(f"{contract.VOLUME_PATH}/{run.volume_path}")
    return [
        "node",
        f"{contract.CONFIG_PATH}/{names.CONFIG_FILE}",
        *("--join", f"{host}:{names.JOIN_PORT}"),
        *build_token_arguments(),
        *("--node", str(index)),
        *("--address", "$(EVERGRAD_POD_IP)"),
        *("--run-directory", folder),
        *("--base-directory", folder),
        *("--grace", str(grace)),
        *("--termination-log", names.TERMINATION_LOG),
    ]


def _build_queue(run: TrainingRun, node: Node) -> tuple[dict[str, str], dict[str, str]]:
    """Build labels and annotations for Kueue, whose groups of pods have a fixed size.

    The nodes a run cannot do without are one group, admitted together; each node above them is admitted
    alone, whenever there is room, and given back alone.
    """
    gang = node.gang
    if gang is None:
        return {}, {}
    if node.index not in gang.members:
        priority = run.annotations.get(names.ANNOTATION_ELASTIC_PRIORITY)
        if priority and node.index >= gang.minimum:
            return {names.LABEL_QUEUE_PRIORITY: priority}, {}
        return {}, {}
    annotations = {
        names.ANNOTATION_QUEUE_GROUP_SIZE: str(gang.size),
        # Without it Kueue keeps quota and pods of a group that has failed, is suspended or is deleted. It is
        # there from the beginning: after a deletion no operator may be left to add it. A group with a live
        # pod takes replacements all the same.
        names.ANNOTATION_QUEUE_GROUP_RETRIABLE: "false",
        # Kueue takes a pod of other affinities for one of another role, which its group has no place for: a
        # replacement that keeps away from a faulty host would never be admitted.
        names.ANNOTATION_QUEUE_ROLE: names.ROLE_NODE,
        # A node that went silent is fenced off: Kueue, if it is configured to, need not wait for its host.
        names.ANNOTATION_QUEUE_FORCED: "true",
    }
    # Neighbours in rank are placed next to each other, where a topology is asked for. Kueue refuses a group
    # with an index beyond its size, as of one that was begun beside a node that lives.
    if max(gang.members) < gang.size:
        annotations[names.ANNOTATION_QUEUE_INDEX] = names.LABEL_INDEX
    group = names.queue_group_name(run.name, run.uid, gang.number)
    return {names.LABEL_QUEUE_GROUP: group}, annotations


def grace_seconds(run: TrainingRun) -> int:
    """Return the seconds from SIGTERM until a node leaves by itself."""
    given, script = run.spec.template.termination_grace_period_seconds, run.spec.script
    if script is None:
        return (given or GRACE_SECONDS) - _MARGIN_SECONDS
    return max((given or 0) - _MARGIN_SECONDS, script.grace_period_seconds)


def metrics_port(run: TrainingRun) -> int:
    """Return the port on which a node serves its metrics; 0 where the run asked for any free port."""
    given = run.parsed.metrics_port
    return names.METRICS_PORT if given is None else given
