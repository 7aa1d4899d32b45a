"""Builds the pod that prepares a run's data before any node is created."""

import math
from pathlib import PurePosixPath

from evergrad_common import contract
from evergrad_manifest.envelope.other_pods import Preparation
from evergrad_manifest.values.quantities import quantity_value
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import JsonObject, escape
from evergrad_operator.core.plan.init_containers import build_init_containers
from evergrad_operator.core.plan.node_pod import (
    build_trainer_container,
    build_trainer_volumes,
)
from evergrad_operator.core.plan.pod_beside import PodBeside, build_pod_beside
from evergrad_operator.core.plan.resources import bound_disk
from evergrad_operator.core.plan.template import build_placement_beside
from evergrad_operator.core.plan.token import build_token_arguments


def build_preparation_pod(
    run: ParsedRun,
    memory: Memory,
    config: Config,
    attempt: int,
    *,
    token: str,
) -> JsonObject:
    """Build the pod that prepares the data. ``token``: the run's token."""
    given = run.spec.preparation or Preparation()
    resources = bound_disk(
        given.resources,
        config.preparation_ephemeral_storage,
        config.preparation_ephemeral_storage_limit,
    )

    # Use the folder in which the nodes look for prepared data.
    folder = PurePosixPath(contract.VOLUME_PATH) / run.volume_path
    cpu = given.resources.limits.get("cpu") or given.resources.requests.get("cpu")
    # Set the number of workers. Otherwise there would be one worker per core of the host, which are all
    # visible in the container.
    workers = []
    if cpu:
        number = max(1, math.ceil(quantity_value(cpu)))
        workers = ["--workers", str(number)]
    arguments = [
        "prepare",
        f"{contract.CONFIG_PATH}/{names.CONFIG_FILE}",
        *("--base-directory", escape(str(folder))),
        *("--prepared-directory", escape(str(folder.parent / contract.PREPARED_FOLDER))),
        *workers,
        *("--status-port", str(names.STATUS_PORT)),
        *build_token_arguments(),
        *("--termination-log", names.TERMINATION_LOG),
    ]
    port = {"name": "status", "containerPort": names.STATUS_PORT, "protocol": "TCP"}
    container = build_trainer_container(
        run,
        memory,
        config,
        resources,
        arguments=arguments,
        ports=[port],
    )
    beside = PodBeside(
        name=names.preparation_pod_name(run.name, attempt),
        role=names.ROLE_PREPARATION,
        attempt=attempt,
        container=container,
        init_containers=build_init_containers(run, memory, config, resources),
        volumes=build_trainer_volumes(run, config, resources, token=token),
        placement=build_placement_beside(
            run, given.node_selector, avoided=memory.faults.avoided
        ),
    )
    return build_pod_beside(run, memory, config, beside)
