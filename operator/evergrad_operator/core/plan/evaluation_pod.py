"""Builds the pod that evaluates one checkpoint of a run."""

from typing import Final

from evergrad_common import contract
from evergrad_manifest.envelope.other_pods import CheckpointEvaluation
from evergrad_operator.core.decision import EvaluationPod
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
from evergrad_operator.core.plan.template import build_placement_beside, require_host

_NOT_NEEDED: Final = ("evergrad-config",)
"""Volumes of a node that the pod does not need, because it reads only the run's directory."""


def build_evaluation_pod(
    run: ParsedRun, memory: Memory, config: Config, wanted: EvaluationPod
) -> JsonObject:
    """Build the pod that evaluates the checkpoint of a step."""
    given = run.spec.evaluation or CheckpointEvaluation()
    resources = bound_disk(
        given.resources,
        config.evaluation_ephemeral_storage,
        config.evaluation_ephemeral_storage_limit,
    )
    container = build_trainer_container(
        run,
        memory,
        config,
        resources,
        arguments=[
            "evaluate",
            escape(f"{contract.VOLUME_PATH}/{run.volume_path}"),
            *("--checkpoint", str(wanted.step)),
            *("--termination-log", names.TERMINATION_LOG),
        ],
        ports=[],
    )
    mounts = container["volumeMounts"]
    volumes = build_trainer_volumes(run, config, resources, token="")  # it needs none
    container["volumeMounts"] = [one for one in mounts if one["name"] not in _NOT_NEEDED]

    # Avoid only hosts on which evaluations failed. Hosts on which nodes failed may work for an evaluation.
    hosts = tuple(host for host, _ in memory.evaluation.tries.hosts)
    placement = build_placement_beside(run, given.node_selector, avoided=hosts)
    if wanted.host:
        placement["affinity"] = require_host(placement["affinity"], wanted.host)
    beside = PodBeside(
        name=names.evaluation_pod_name(run.name, wanted.step, wanted.attempt),
        role=names.ROLE_EVALUATION,
        attempt=wanted.attempt,
        container=container,
        init_containers=build_init_containers(run, memory, config, resources),
        volumes=[one for one in volumes if one["name"] not in _NOT_NEEDED],
        placement=placement,
    )
    pod = build_pod_beside(run, memory, config, beside)
    if wanted.host:
        # Record the host, so that a later pass can detect that no node runs on it any more.
        pod["metadata"]["annotations"][names.ANNOTATION_HOST] = wanted.host
    return pod
