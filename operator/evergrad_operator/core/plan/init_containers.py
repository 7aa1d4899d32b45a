"""The init containers of a run's pods, which end before the trainer's container starts."""

from typing import Final

from evergrad_common import contract
from evergrad_manifest.envelope.resources import Resources
from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.raw import get_maps
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import (
    JsonObject,
    build_container_security,
    without_none,
)
from evergrad_operator.core.plan.resources import build_resources, drop_devices
from evergrad_operator.core.plan.template import merge_env

CACHES: Final = {
    "HOME": "/tmp",
    "USER": "evergrad",
    "XDG_CACHE_HOME": "/tmp/.cache",
    "HF_HOME": "/tmp/.cache/huggingface",
    "MPLCONFIGDIR": "/tmp/.cache/matplotlib",
    "TORCHINDUCTOR_CACHE_DIR": "/tmp/.cache/torchinductor",
    "TRITON_CACHE_DIR": "/tmp/.cache/triton",
}
"""Environment of a user without a name and a home, with a read-only root file system."""


def build_init_containers(
    run: ParsedRun, memory: Memory, config: Config, resources: Resources
) -> list[JsonObject]:
    """Build the init containers of the template. ``resources``: resources of the pod's own container.

    They have the same restrictions, volume and scratch space as the trainer's container. They have neither
    the run's token nor its manifest, because only the trainer needs these.
    """
    built = []
    for given in run.spec.template.init_containers:
        policy = given.get("imagePullPolicy") or run.spec.image_pull_policy
        container = {
            "name": given["name"],
            "image": given.get("image") or memory.image_pin or memory.image,
            "imagePullPolicy": policy or config.image_pull_policy,
            "command": given.get("command"),
            "args": given.get("args"),
            "workingDir": given.get("workingDir"),
            "env": merge_env(CACHES, tuple(get_maps(given, "env"))),
            "envFrom": given.get("envFrom"),
            # Default to the trainer's resources: the init containers end first, so the pod requests no more.
            "resources": given.get("resources") or build_resources(drop_devices(resources)),
            "securityContext": build_container_security(),
            "terminationMessagePath": names.TERMINATION_LOG,
            # A failed container rarely writes a message, so the end of its log replaces the message.
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": [
                {"name": "evergrad-volume", "mountPath": contract.VOLUME_PATH},
                {"name": "evergrad-tmp", "mountPath": "/tmp"},
                *get_maps(given, "volumeMounts"),
            ],
        }
        built.append(without_none(container))
    return built
