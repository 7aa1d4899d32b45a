"""The pod that evaluates one checkpoint of a run."""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_coordinator import contract
from evergrad_manifest.envelope.beside import CheckpointEvaluation
from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.decision import EvaluationPod
from evergrad_operator.memory import Memory
from evergrad_operator.plan.common import (
    JsonObject,
    build_labels,
    build_metadata,
    build_pod_security,
    build_pull_secrets,
    build_tolerations,
    escape,
    without_none,
)
from evergrad_operator.plan.node_pod import build_trainer_container, build_trainer_volumes
from evergrad_operator.plan.template import (
    build_coordinator_metadata,
    build_placement_beside,
    require_host,
)
from evergrad_operator.spec import TrainingRun

_GRACE_SECONDS: Final = 30
"""Time from SIGTERM to the end: to measure a batch, and to write down what was measured."""
_NOT_NEEDED: Final = ("evergrad-config", "evergrad-token")
"""Volumes of a node that it lacks: all that it reads is in the run's directory, and it asks nobody."""


def build_evaluation_pod(
    run: TrainingRun, memory: Memory, config: Config, wanted: EvaluationPod
) -> JsonObject:
    """Build the pod that evaluates the checkpoint of a step."""
    given = run.spec.evaluation or CheckpointEvaluation()
    container, volumes = _build_parts(run, memory, config, wanted)
    hosts = tuple(host for host, _ in memory.evaluation.tries.hosts)
    placement = build_placement_beside(run, given.node_selector, avoided=hosts)
    if wanted.host:
        placement["affinity"] = require_host(placement["affinity"], wanted.host)
    spec: JsonObject = {
        # One that ends is replaced by a new pod, perhaps on another host.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **placement,
        "tolerations": build_tolerations(
            run.spec.template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "containers": [container],
        "volumes": volumes,
    }

    # It is no node: labels by which the template counts or groups nodes are not for it. A queue admits it
    # alone. Ours come last: a template must not take a pod out of its run.
    metadata = build_metadata(
        run, names.evaluation_pod_name(run.name, wanted.step, wanted.attempt)
    )
    labels, annotations = build_coordinator_metadata(run)
    queue = {key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels}
    metadata["labels"] = {
        **labels,
        **queue,
        **build_labels(run, role=names.ROLE_EVALUATION),
        names.LABEL_ATTEMPT: str(wanted.attempt),
    }
    metadata["annotations"] = {
        **annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": without_none(spec)}


def _build_parts(
    run: TrainingRun, memory: Memory, config: Config, wanted: EvaluationPod
) -> tuple[JsonObject, list[Mapping[str, Any]]]:
    """Build its container and the volumes: those of a node that it needs."""
    given = run.spec.evaluation or CheckpointEvaluation()
    folder = escape(f"{contract.VOLUME_PATH}/{run.volume_path}")
    container = build_trainer_container(
        run,
        memory,
        config,
        given.resources,
        arguments=[
            "evaluate",
            folder,
            *("--checkpoint", str(wanted.step)),
            *("--termination-log", names.TERMINATION_LOG),
        ],
        ports=[],
    )
    container["volumeMounts"] = [
        one for one in container["volumeMounts"] if one["name"] not in _NOT_NEEDED
    ]
    volumes = [
        one
        for one in build_trainer_volumes(run, config, token="")
        if one["name"] not in _NOT_NEEDED
    ]
    return container, volumes
