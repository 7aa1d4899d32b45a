"""Builds the pod of one node, which trains."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_common import contract
from evergrad_manifest.envelope.resources import Resources
from evergrad_operator.core.decision import Gang
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
    escape,
    without_none,
)
from evergrad_operator.core.plan.init_containers import CACHES, build_init_containers
from evergrad_operator.core.plan.pod_group import COSCHEDULING
from evergrad_operator.core.plan.resources import (
    EPHEMERAL_STORAGE,
    bound_disk,
    build_resources,
)
from evergrad_operator.core.plan.template import (
    build_scheduling,
    build_user_labels,
    merge_env,
)
from evergrad_operator.core.plan.token import (
    TOKEN_OPTION,
    build_token_arguments,
    build_token_mount,
    build_token_volume,
)

GRACE_SECONDS: Final = 30
"""Time from SIGTERM to SIGKILL if neither the run nor its script sets one."""
_MARGIN_SECONDS: Final = 5
"""Time that the supervisor needs to end after its workers, before the kubelet kills it."""


@dataclass(frozen=True)
class NodePlan:
    """The node of a run for which a pod is built.

    ``is_on_one_host``: whether all pods of the run must be on the same host. ``gang``: the gang of a run in a
    queue; None without a queue. ``joins_group``: whether the pod belongs to the run's PodGroup, whose
    priority class is ``group_priority``.
    """

    index: int
    attempt: int
    is_on_one_host: bool = False
    gang: Gang | None = None
    joins_group: bool = False
    group_priority: str = ""


def build_node_pod(
    run: ParsedRun, memory: Memory, config: Config, node: NodePlan, *, token: str
) -> JsonObject:
    """Build the pod of one node. ``token``: the run's token; empty if its coordinator has none."""
    template, grace, port = run.spec.template, grace_seconds(run), metrics_port(run)
    arguments = _build_arguments(run, config, index=node.index, grace=grace, token=token)
    ports = [{"name": "metrics", "containerPort": port, "protocol": "TCP"}] if port else []
    resources = bound_disk(
        run.spec.resources,
        config.node_ephemeral_storage,
        config.node_ephemeral_storage_limit,
    )
    pod: JsonObject = {
        # The operator replaces an ended node with a new pod, possibly on another host, because the host may
        # be broken.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace + _MARGIN_SECONDS,
        # Even with a service account, mount no token. A run that needs a token adds a projected volume.
        "automountServiceAccountToken": False,
        "serviceAccountName": template.service_account_name,
        # In a namespace with many Services, each pod would get many environment variables.
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **build_scheduling(
            run, is_on_one_host=node.is_on_one_host, avoided=memory.faults.avoided
        ),
        "schedulerName": template.scheduler_name or config.scheduler_name,
        "tolerations": build_tolerations(
            template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "initContainers": build_init_containers(run, memory, config, resources),
        "containers": [
            build_trainer_container(
                run, memory, config, resources, arguments=arguments, ports=ports
            )
        ],
        "volumes": build_trainer_volumes(run, config, resources, token=token),
    }

    # scheduler-plugins uses a label to find a pod's group; Kubernetes uses a field of the spec.
    has_label = node.joins_group and config.gang == COSCHEDULING
    if node.joins_group and not has_label:
        pod["schedulingGroup"] = {"podGroupName": run.name}
        pod["priorityClassName"] = node.group_priority

    labels = {names.LABEL_GANG: run.name} if has_label else {}
    metadata = _build_node_metadata(run, memory, config, node, labels=labels)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": without_none(pod),
    }


def _build_node_metadata(
    run: ParsedRun, memory: Memory, config: Config, node: NodePlan, *, labels: JsonObject
) -> JsonObject:
    # Our labels come last, so that a template cannot detach a pod from its run.
    metadata = build_metadata(run, names.node_pod_name(run.name, node.index, node.attempt))
    queue_labels, queue_annotations = _build_queue(run, node)
    metadata["labels"] = {
        **build_user_labels(run),
        **labels,
        **queue_labels,
        **build_labels(run, role=names.ROLE_NODE),
        names.LABEL_INDEX: str(node.index),
        names.LABEL_ATTEMPT: str(node.attempt),
    }
    # The template's annotations take precedence over the annotations for scraping.
    metadata["annotations"] = {
        **build_scrape_annotations(metrics_port(run), config),
        **run.spec.template.annotations,
        **queue_annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    return metadata


def build_trainer_volumes(
    run: ParsedRun, config: Config, resources: Resources, *, token: str
) -> list[Mapping[str, Any]]:
    """Build the volumes that ``build_trainer_container`` mounts.

    ``resources``: resources of the container. ``token``: the run's token (may be empty).
    """
    # One limit on the host's disk is enough, because a limit of the container also covers /tmp.
    is_bounded = EPHEMERAL_STORAGE in resources.limits
    scratch = without_none({"sizeLimit": None if is_bounded else config.scratch_size})
    shared_memory = without_none(
        {"medium": "Memory", "sizeLimit": config.shared_memory_size}
    )
    return [
        {"name": "evergrad-volume", "persistentVolumeClaim": {"claimName": run.claim_name}},
        {"name": "evergrad-config", "configMap": {"name": names.config_name(run.name)}},
        {"name": "evergrad-tmp", "emptyDir": scratch},
        {"name": "evergrad-shm", "emptyDir": shared_memory},
        *([build_token_volume(run, token)] if token else []),
        *run.spec.template.volumes,
    ]


def build_trainer_container(
    run: ParsedRun,
    memory: Memory,
    config: Config,
    resources: Resources,
    *,
    arguments: list[str],
    ports: list[JsonObject],
) -> JsonObject:
    """Build a container of the trainer's image that runs ``evergrad`` with these arguments."""
    spec = run.spec
    # The root file system is read-only, so point the caches of libraries to /tmp.
    env = merge_env(CACHES, spec.template.env)
    if spec.script is not None:
        sources = spec.script.value_from.items()
        env += [{"name": name, "valueFrom": source} for name, source in sources]
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
            # Variables in env take precedence over the keys of envFrom.
            "envFrom": list(spec.template.env_from),
            "ports": ports,
            "resources": build_resources(resources),
            # Check the limits, because devices are requested by limits. Kubernetes refuses requests without
            # limits.
            "securityContext": build_container_security(
                locks_memory=any(name in run.profile.rdma for name in resources.limits)
            ),
            "terminationMessagePath": names.TERMINATION_LOG,
            # A killed process writes no message. The kubelet then uses the end of the log.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "evergrad-volume", "mountPath": contract.VOLUME_PATH},
                {
                    "name": "evergrad-config",
                    "mountPath": contract.CONFIG_PATH,
                    "readOnly": True,
                },
                *([build_token_mount()] if TOKEN_OPTION in arguments else []),
                {"name": "evergrad-tmp", "mountPath": "/tmp"},
                {"name": "evergrad-shm", "mountPath": "/dev/shm"},
                *spec.template.volume_mounts,
            ],
        }
    )


def _build_arguments(
    run: ParsedRun, config: Config, *, index: int, grace: int, token: str
) -> list[str]:
    """Build the arguments of ``evergrad`` for the node with this index."""
    host = f"{names.coordinator_service_name(run.name)}.{run.namespace}.{config.cluster_domain or 'svc'}"
    # Escape the folder, because the kubelet would replace ``$(NAME)`` in its name.
    folder = escape(f"{contract.VOLUME_PATH}/{run.volume_path}")
    return [
        "node",
        f"{contract.CONFIG_PATH}/{names.CONFIG_FILE}",
        *("--join", f"{host}:{names.JOIN_PORT}"),
        *(build_token_arguments() if token else ()),
        *("--node", str(index)),
        *("--address", "$(EVERGRAD_POD_IP)"),
        *("--run-directory", folder),
        *("--base-directory", folder),
        *("--grace", str(grace)),
        *("--termination-log", names.TERMINATION_LOG),
    ]


def _build_queue(run: ParsedRun, node: NodePlan) -> tuple[dict[str, str], dict[str, str]]:
    """Build labels and annotations for Kueue, whose groups of pods have a fixed size.

    Nodes below the minimum form one group and are admitted together. Each node above the minimum is admitted
    alone if there is room, and is preempted alone.
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
        # Without this annotation, Kueue keeps the quota and the pods of a group that has failed, is suspended
        # or is deleted. Set it at creation, because after a deletion the operator may not be able to add it.
        # A group with a live pod still accepts replacements.
        names.ANNOTATION_QUEUE_GROUP_RETRIABLE: "false",
        # Kueue treats a pod with another affinity as a pod of another role, for which the group has no room.
        # Without this annotation a replacement that avoids a faulty host would never be admitted.
        names.ANNOTATION_QUEUE_ROLE: names.ROLE_NODE,
        # An unreachable node is fenced off by the coordinator, so Kueue may delete its pod without waiting
        # for the host, if Kueue is configured to do so.
        names.ANNOTATION_QUEUE_FORCED: "true",
    }
    # With a requested topology, Kueue places nodes with neighbouring ranks next to each other. Kueue refuses
    # a group with an index above its size, which happens if another node was still live when the group was
    # created.
    if max(gang.members) < gang.size:
        annotations[names.ANNOTATION_QUEUE_INDEX] = names.LABEL_INDEX
    group = names.queue_group_name(run.name, run.uid, gang.number)
    return {names.LABEL_QUEUE_GROUP: group}, annotations


def grace_seconds(run: ParsedRun) -> int:
    """Return the seconds from SIGTERM until a node leaves on its own."""
    given, script = run.spec.template.termination_grace_period_seconds, run.spec.script
    if script is None:
        return (given or GRACE_SECONDS) - _MARGIN_SECONDS
    return max((given or 0) - _MARGIN_SECONDS, script.grace_period_seconds)


def metrics_port(run: ParsedRun) -> int:
    """Return the port on which a node serves its metrics; 0 if the run requests any free port."""
    given = run.parsed.metrics_port
    return names.METRICS_PORT if given is None else given
