"""The init containers of a run's pods: they end before the trainer's container starts."""

from collections.abc import Mapping
from typing import Any, Final

from evergrad_coordinator import contract
from evergrad_manifest.envelope.resources import Resources
from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.memory import Memory
from evergrad_operator.plan.common import JsonObject, build_container_security, without_none
from evergrad_operator.plan.resources import build_resources, drop_devices
from evergrad_operator.plan.template import merge_env
from evergrad_operator.raw import get_maps
from evergrad_operator.spec import TrainingRun

CACHES: Final = {
    "HOME": "/tmp",
    "USER": "evergrad",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "HF_HOME": "/tmp/.cache/huggingface",
    "MPLCONFIGDIR": "/tmp/.cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/torchinductor",
    "TRITON_CACHE_DIR": "/tmp/.cache/triton",
}
"""Environment of a user without a name or home, on a root file system that cannot be written."""


def build_init_containers(
    run: TrainingRun, memory: Memory, config: Config, resources: Resources
) -> list[JsonObject]:
    """Build the init containers of the template. ``resources``: those of the pod's own container."""
    return [
        _build_container(run, memory, config, resources, given)
        for given in run.spec.template.init_containers
    ]


def _build_container(
    run: TrainingRun,
    memory: Memory,
    config: Config,
    resources: Resources,
    given: Mapping[str, Any],
) -> JsonObject:
    """Build one of them: as restricted as the trainer's container, on the same volume and scratch space.

    It has neither the run's token nor its manifest, which are for the trainer.
    """
    spec = run.spec
    # They run before the trainer's container, so that its resources are theirs at no cost.
    own = given.get("resources") or build_resources(drop_devices(resources))
    return without_none(
        {
            "name": given["name"],
            "image": given.get("image") or memory.image_pin or memory.image,
            "imagePullPolicy": given.get("imagePullPolicy")
            or spec.image_pull_policy
            or config.image_pull_policy,
            "command": given.get("command"),
            "args": given.get("args"),
            "workingDir": given.get("workingDir"),
            "env": merge_env(CACHES, tuple(get_maps(given, "env"))),
            "envFrom": given.get("envFrom"),
            "resources": own,
            "securityContext": build_container_security(),
            "terminationMessagePath": names.TERMINATION_LOG,
            # One that fails rarely writes a message: the end of its log stands in for it.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "evergrad-volume", "mountPath": contract.VOLUME_PATH},
                {"name": "evergrad-tmp", "mountPath": "/tmp"},
                *get_maps(given, "volumeMounts"),
            ],
        }
    )
