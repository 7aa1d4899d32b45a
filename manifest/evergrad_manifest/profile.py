"""Profiles: the defaults of an installation and a namespace for fields that a run leaves out, and the
requests that they allow.

The parts of ``defaults`` have the same names as in a run's ``spec``. A profile never contains a part of the
recipe: only the file decides what is trained, and the identity of the run. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal

from pydantic import Field, ValidationError

from evergrad_common.contract import LABEL_QUEUE
from evergrad_manifest.envelope import (
    LONGEST_SECONDS,
    TrainingRun,
    check_image,
    check_labels,
)
from evergrad_manifest.envelope.resources import Resources, check_resources_at
from evergrad_manifest.envelope.storage import check_storage
from evergrad_manifest.envelope.template import RULES as RULES_OF_TEMPLATE
from evergrad_manifest.envelope.template import Template
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.containers import containers_of
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.nesting import check_depth
from evergrad_manifest.model.view import View, without_nulls
from evergrad_manifest.reading.problems import at_most, problems_of
from evergrad_manifest.values.numbers import Whole
from evergrad_manifest.values.quantities import (
    LONGEST_LABEL,
    Quantity,
    fault_of_key,
    fault_of_label_value,
)

DEFAULT_PROFILE: Final = "default"
"""Profile of the installation that applies if a run names none."""
NAMESPACE_PROFILE: Final = "evergrad-profile"
"""ConfigMap with the profile of its namespace."""
NAMESPACE_PROFILE_KEY: Final = "profile.yaml"
RDMA_PREFIX: Final = "rdma/"
"""Prefix of resources that a run may request only if a profile lists them."""
_KEYS_OF_ITEMS: Final = {
    "env": "name",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
}
"""Lists whose items have unique names: an item of the run replaces the item of the same name. Other lists are
appended."""
_SECTIONS: Final = ("defaults", "storage", "template", "preparation", "evaluation")
_BESIDE: Final = ("preparation", "evaluation")


class ProfileStorage(Section):
    """New volumes of runs that name no volume of their own."""

    size: Quantity | None = None
    """Size, such as ``20Gi``."""
    storage_class_name: str | None = Field(default=None, min_length=1)
    """Storage class; needs a size."""
    access_modes: tuple[Literal["ReadWriteOnce", "ReadWriteMany"], ...] | None = Field(
        default=None, min_length=1, max_length=2
    )
    """Access modes."""


class ProfileBeside(Section):
    """A pod beside the nodes, of runs that ask for one."""

    resources: Resources = Resources()
    """Resources of its pod."""


class Defaults(Section):
    """Values for what a run leaves out, by the names of a run's ``spec``."""

    queue_name: str | None = Field(default=None, min_length=1, max_length=LONGEST_LABEL)
    """Kueue's queue of runs that are in none: the label ``kueue.x-k8s.io/queue-name`` of the run."""
    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """Image of the training pods."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image."""
    resources: Resources = Resources()
    """Resources of each node's pod."""
    storage: ProfileStorage = ProfileStorage()
    """New volumes."""
    template: Template = Template()
    """The allowed part of a pod template."""
    preparation: ProfileBeside = ProfileBeside()
    """The pod of runs that have ``preparation``."""
    evaluation: ProfileBeside = ProfileBeside()
    """The pods of runs that have ``evaluation``."""
    active_deadline_seconds: Whole | None = Field(default=None, ge=1, le=LONGEST_SECONDS)
    """Seconds after its start at which a run that is not complete fails."""
    ttl_seconds_after_finished: Whole | None = Field(default=None, ge=0, le=LONGEST_SECONDS)
    """Seconds after the end until what the run made is deleted, but never its volume."""
    ttl_deletes: Literal["Children", "Run"] | None = None
    """Whether the run itself is deleted then, too."""


class Allows(Section):
    """Requests that runs may make beyond those of every run."""

    rdma: tuple[str, ...] = ()
    """Resources of RDMA devices, such as ``rdma/hca_shared_devices_a``; a pod that asks for one also has the
    capability IPC_LOCK."""


class ProfileSpec(Section):
    """A profile. Only those of the installation have ``namespaces`` and ``allows``."""

    namespaces: tuple[str, ...] = ()
    """Namespaces whose runs may have it; default: all."""
    defaults: Defaults = Defaults()
    """Values for what a run leaves out."""
    allows: Allows = Allows()
    """Requests that runs may make."""


def check_profile(raw: Any, *, of_namespace: bool = False) -> tuple[Problem, ...]:
    """Return every problem of a profile, with paths inside it. ``of_namespace``: the profile may have only
    ``defaults``."""
    if not isinstance(raw, Mapping):
        why = "a profile has the key defaults"
        return (
            Problem("", "is not a mapping", why, "Write `defaults:` with values below it"),
        )
    if (too_deep := check_depth(raw)) is not None:
        return (too_deep,)

    # Check the model first, then apply the rules of a run's own file to the same values.
    pruned = without_nulls(raw, ProfileSpec)
    problems: list[Problem] = []
    try:
        ProfileSpec.model_validate(pruned)
    except ValidationError as error:
        problems += problems_of(error, pruned, root=ProfileSpec)
    for key in ("namespaces", "allows") if of_namespace else ():
        if key in pruned:
            why = "only the installation's profiles say what is allowed, and to whom"
            problems.append(Problem(key, "has no meaning in a namespace", why, "Remove it"))

    problems += _check_defaults(pruned.get("defaults"))
    problems += _check_devices(pruned.get("allows"))
    return at_most(problems)


def _check_defaults(given: Any) -> Iterator[Problem]:
    # The rules of a run's file read the values below ``spec``. Their problems name the profile's own path.
    defaults: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    view = View({"spec": dict(defaults)}, TrainingRun)
    found = [
        *check_resources_at(view, "spec", "resources"),
        *(
            one
            for key in _BESIDE
            for one in check_resources_at(view, "spec", key, "resources")
        ),
        *(one for rule in (check_storage, check_image, check_labels) for one in rule(view)),
        *(one for rule in RULES_OF_TEMPLATE for one in rule(view)),
    ]
    for problem in found:
        path = f"defaults{problem.path.removeprefix('spec')}"
        yield replace(problem, path=path)
    queue = defaults.get("queueName")
    if isinstance(queue, str) and (fault := fault_of_label_value(queue)) is not None:
        yield Problem("defaults.queueName", *fault, "Correct it")


def _check_devices(allows: Any) -> Iterator[Problem]:
    named = allows.get("rdma") if isinstance(allows, Mapping) else None
    for index, name in enumerate(named if isinstance(named, list | tuple) else ()):
        path = format_path(("allows", "rdma", index))
        if isinstance(name, str) and (fault := fault_of_key(name)) is not None:
            yield Problem(path, *fault, "Write a resource's name")
        elif isinstance(name, str) and "/" not in name:
            why = "a device's resource has the prefix of its plug-in"
            remedy = f"Write it such as {RDMA_PREFIX}hca_shared_devices_a"
            yield Problem(path, f"{name!r} is not a device", why, remedy)


def merge_defaults(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``defaults`` of two profiles as one. Values of ``above`` take precedence."""
    return _merge_section(without_nulls(below, Defaults), without_nulls(above, Defaults))


def apply_defaults(
    document: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the run ``document`` with the defaults for fields that it leaves out. Its own values always take
    precedence.

    A value that cannot be parsed is not changed, so that the run's own validation refuses it.
    """
    spec, metadata = document.get("spec"), document.get("metadata")
    if not defaults or not isinstance(spec, Mapping):
        return dict(document)
    given = dict(defaults)
    queue = given.pop("queueName", None)

    # A default section of an additional pod would request that pod, and an existing volume already has its
    # class.
    for key in _BESIDE:
        if spec.get(key) is None:
            given.pop(key, None)
    storage = spec.get("storage")
    if isinstance(storage, Mapping) and storage.get("claimName") is not None:
        given.pop("storage", None)
    merged = {**document, "spec": _merge_section(given, spec)}

    labels = {} if not isinstance(metadata, Mapping) else metadata.get("labels") or {}
    if queue is not None and isinstance(metadata, Mapping) and isinstance(labels, Mapping):
        merged["metadata"] = {**metadata, "labels": {LABEL_QUEUE: queue, **labels}}
    return merged


def _merge_section(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sections. None counts as left out, as for the API server."""
    merged = dict(above)
    for key, value in below.items():
        own = above.get(key)
        if own is None:
            merged[key] = value
        elif isinstance(own, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge_maps(key, value, own)
        elif isinstance(own, list | tuple) and isinstance(value, list | tuple):
            merged[key] = _merge_lists(key, value, own)
    return merged


def _merge_maps(
    key: str, below: Mapping[str, Any], above: Mapping[str, Any]
) -> dict[str, Any]:
    if key in _SECTIONS:
        return _merge_section(below, above)
    if key != "resources":
        return {**below, **above}
    # If the run names a resource as request or as limit, use both from the run: a profile's limit below the
    # run's request would make a pod that no API server accepts.
    named = {
        name for values in above.values() if isinstance(values, Mapping) for name in values
    }
    merged = dict(above)
    for kind, values in below.items():
        own = above.get(kind)
        if own is None or isinstance(own, Mapping):
            rest = {name: value for name, value in values.items() if name not in named}
            merged[kind] = {**rest, **(own or {})}
    return merged


def _merge_lists(key: str, below: Sequence[Any], above: Sequence[Any]) -> list[Any]:
    """Put the items of the profile first, so that a variable of the run may refer to a variable of the
    profile."""
    if key == "accessModes":
        return list(above)
    name = _KEYS_OF_ITEMS.get(key)
    if name is None:
        return [*below, *(item for item in above if item not in below)]
    own = [item.get(name) for item in above if isinstance(item, Mapping)]
    kept = [
        item for item in below if not isinstance(item, Mapping) or item.get(name) not in own
    ]
    return [*kept, *above]


def check_allowed(document: Mapping[str, Any], rdma: Sequence[str]) -> tuple[Problem, ...]:
    """Return a problem for each RDMA device that a run requests and no profile allows.

    ``document``: the run with its defaults. ``rdma``: the allowed resources.
    """
    allowed = f"it allows {', '.join(rdma)}" if rdma else "it allows none"
    return tuple(
        Problem(
            path,
            "is not allowed by the profile of the run",
            allowed,
            "Name a profile that allows it (spec.profile), or remove it",
        )
        for container in containers_of(document)
        for name, path in container.asked()
        if name.startswith(RDMA_PREFIX) and name not in rdma
    )
