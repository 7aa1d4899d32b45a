"""The pod that prepares a run's data, before any node is asked for."""

import math
from pathlib import PurePosixPath
from typing import Final

from evergrad_coordinator import contract
from evergrad_manifest.envelope.beside import Preparation
from evergrad_manifest.values.quantities import quantity_value
from evergrad_operator import names
from evergrad_operator.config import Config
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
from evergrad_operator.plan.template import build_coordinator_metadata, build_placement_beside
from evergrad_operator.plan.token import build_token_arguments
from evergrad_operator.spec import TrainingRun

_GRACE_SECONDS: Final = 30
"""Time from SIGTERM to the end: finished chunks are on the volume already."""


def build_preparation_pod(
    run: TrainingRun,
    memory: Memory,
    config: Config,
    attempt: int,
    *,
    token: str,
) -> JsonObject:
    """Build the pod that prepares the data. ``token``: the run's."""
    template, given = run.spec.template, run.spec.preparation or Preparation()
    port = {"name": "status", "containerPort": names.STATUS_PORT, "protocol": "TCP"}
    container = build_trainer_container(
        run,
        memory,
        config,
        given.resources,
        arguments=_build_arguments(run, given),
        ports=[port],
    )
    spec: JsonObject = {
        # One that ends is replaced by a new pod, perhaps on another host.
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": build_pod_security(config),
        **build_placement_beside(run, given.node_selector, avoided=memory.faults.avoided),
        "tolerations": build_tolerations(
            template.tolerations, config.node_loss_toleration_seconds
        ),
        "imagePullSecrets": build_pull_secrets(run, config),
        "containers": [container],
        "volumes": build_trainer_volumes(run, config, token=token),
    }

    # It is no node: labels by which the template counts or groups nodes are not for it. A queue admits it
    # alone. Ours come last: a template must not take a pod out of its run.
    metadata = build_metadata(run, names.preparation_pod_name(run.name, attempt))
    labels, annotations = build_coordinator_metadata(run)
    queue = {key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels}
    metadata["labels"] = {
        **labels,
        **queue,
        **build_labels(run, role=names.ROLE_PREPARATION),
        names.LABEL_ATTEMPT: str(attempt),
    }
    metadata["annotations"] = {
        **annotations,
        names.ANNOTATION_RESTART: str(memory.restart),
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": without_none(spec)}


def _build_arguments(run: TrainingRun, given: Preparation) -> list[str]:
    """Build the arguments of ``evergrad``: the folder is where the nodes will look for prepared data."""
    folder = PurePosixPath(contract.VOLUME_PATH) / run.volume_path
    cpu = given.resources.limits.get("cpu") or given.resources.requests.get("cpu")
    # A container sees all cores of its host: without a number there would be a helper for each of them.
    workers = ["--workers", str(max(1, math.ceil(quantity_value(cpu))))] if cpu else []
    return [
        "prepare",
        f"{contract.CONFIG_PATH}/{names.CONFIG_FILE}",
        *("--base-directory", escape(str(folder))),
        *("--prepared-directory", escape(str(folder.parent / contract.PREPARED_FOLDER))),
        *workers,
        *("--status-port", str(names.STATUS_PORT)),
        *build_token_arguments(),
        *("--termination-log", names.TERMINATION_LOG),
    ]
