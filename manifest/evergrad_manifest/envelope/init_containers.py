"""Init containers of ``spec.template``, which end before the training starts."""

from collections.abc import Iterator, Mapping
from typing import Final

from evergrad_common.contract import OUR_VOLUME_PREFIX, TRAINER_CONTAINER
from evergrad_manifest.envelope.resources import check_resources_at
from evergrad_manifest.envelope.volumes import TEMPLATE, check_mounts
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.environment import check_env_from, check_variables
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.items import Keys, check_keys, check_unique, items_at, items_of
from evergrad_manifest.model.view import View
from evergrad_manifest.values.images import IMAGE_REMEDY, IMAGE_RULE, is_image
from evergrad_manifest.values.numbers import show
from evergrad_manifest.values.quantities import is_dns_label

MOST_INIT_CONTAINERS: Final = 8
"""Most init containers. They run one after the other, again in each pod; put work with more steps into a
script of one container."""
_CONTAINER: Final = Keys(
    known=(
        "name",
        "image",
        "imagePullPolicy",
        "command",
        "args",
        "workingDir",
        "env",
        "envFrom",
        "resources",
        "volumeMounts",
    ),
    required=("name",),
    words={"imagePullPolicy": ("Always", "IfNotPresent", "Never")},
    kinds={
        "name": "text",
        "image": "text",
        "command": "texts",
        "args": "texts",
        "workingDir": "text",
        "env": "mappings",
        "envFrom": "mappings",
        "resources": "mapping",
        "volumeMounts": "mappings",
    },
)
_RESOURCES: Final = Keys(
    known=("requests", "limits"), kinds={"requests": "mapping", "limits": "mapping"}
)
_REFUSED: Final[Mapping[str, str]] = {
    "restartPolicy": "each ends before the training starts; there are no sidecars",
    "securityContext": "init containers use the one of the training container",
}
"""Keys of a container that users write here, and why they are refused."""


def check_init_containers(view: View) -> Iterator[Problem]:
    """Check that each init container has a unique name, and only keys that the training container may
    have."""
    containers = items_at(view, *TEMPLATE, "initContainers")
    volumes = items_at(view, *TEMPLATE, "volumes")
    plain = []
    for path, container in containers:
        for key in sorted(_REFUSED.keys() & container.keys()):
            where = format_path((*path, key))
            yield Problem(where, "not allowed here", _REFUSED[key], "Remove it")
        known = {key: value for key, value in container.items() if key not in _REFUSED}
        plain.append((path, known))
    yield from check_keys(plain, _CONTAINER)
    yield from check_unique(containers, "name")
    for path, container in containers:
        name, image, folder = (
            container.get(key) for key in ("name", "image", "workingDir")
        )
        where = format_path((*path, "name"))
        if isinstance(name, str) and name and not is_dns_label(name):
            why = "a container's name has lower-case letters, digits and '-'"
            yield Problem(where, f"{show(name)} is not a valid name", why, "Correct it")
        elif name == TRAINER_CONTAINER or str(name).startswith(OUR_VOLUME_PREFIX):
            what, why = f"{show(name)} is reserved", "the run's own container uses it"
            yield Problem(where, what, why, "Rename it")
        if isinstance(image, str) and not is_image(image):
            where = format_path((*path, "image"))
            yield Problem(where, f"{show(image)} is not an image", IMAGE_RULE, IMAGE_REMEDY)
        if isinstance(folder, str) and not folder.startswith("/"):
            where = format_path((*path, "workingDir"))
            what = f"{show(folder)} is not an absolute path"
            why = "a container has no folder that it could be relative to"
            yield Problem(where, what, why, "Begin it with a slash")

        # Variables, mounts and resources follow the same rules as in the training container.
        yield from check_variables(items_of((*path, "env"), container.get("env")))
        yield from check_env_from(items_of((*path, "envFrom"), container.get("envFrom")))
        mounts = items_of((*path, "volumeMounts"), container.get("volumeMounts"))
        yield from check_mounts(mounts, volumes)
        if isinstance(resources := container.get("resources"), Mapping):
            place = (*path, "resources")
            yield from check_keys([(place, resources)], _RESOURCES)
            yield from check_resources_at(view, *place)
