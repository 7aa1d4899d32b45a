"""``spec.template``: the allowed part of a pod template, and what a user would otherwise only learn from a
pod that never starts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import Field

from evergrad_coordinator.contract import (
    LABEL_PREFIX,
    OUR_MOUNTS,
    OUR_VARIABLE_PREFIXES,
    OUR_VARIABLES,
    OUR_VOLUME_PREFIX,
    PROJECTED_KINDS,
    VOLUME_KINDS,
    hides_ours,
)
from evergrad_manifest.base import Section
from evergrad_manifest.errors import Problem
from evergrad_manifest.fields import FieldPath, format_path, value_at
from evergrad_manifest.spelling import nearest
from evergrad_manifest.values.numbers import Whole, show
from evergrad_manifest.values.quantities import fault_of_key, is_dns_label, is_dns_subdomain
from evergrad_manifest.view import UNKNOWN, View

_TEMPLATE: Final[FieldPath] = ("spec", "template")


class Template(Section):
    """The allowed part of a pod template, spelled as in Kubernetes; has no meaning for ``evergrad run``."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods; the prefix ``evergrad.dev/`` is taken."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node must have."""
    tolerations: tuple[dict[str, Any], ...] = ()
    """Taints of nodes that are tolerated."""
    affinity: dict[str, Any] = Field(default_factory=dict)
    """Affinity to nodes and other pods."""
    topology_spread_constraints: tuple[dict[str, Any], ...] = ()
    """How the pods spread over zones or hosts; a constraint without labelSelector counts the nodes' pods of
    this run."""
    volumes: tuple[dict[str, Any], ...] = ()
    """Volumes besides the run directory's."""
    volume_mounts: tuple[dict[str, Any], ...] = ()
    """Where those volumes are mounted."""
    env: tuple[dict[str, Any], ...] = ()
    """Environment variables of the training processes: ``name`` with ``value`` or ``valueFrom``."""
    priority_class_name: str | None = Field(default=None, min_length=1)
    """Priority class of the pods."""
    runtime_class_name: str | None = Field(default=None, min_length=1)
    """Container runtime of the pods."""
    scheduler_name: str | None = Field(default=None, min_length=1)
    """Scheduler of the pods."""
    image_pull_secrets: tuple[dict[str, Any], ...] = ()
    """Secrets that the image is pulled with: ``name`` each."""
    termination_grace_period_seconds: Whole | None = Field(default=None, ge=10, le=86400)
    """Seconds a pod has to save and leave before it is killed; default: 30, never less than a script's
    gracePeriodSeconds + 5."""


@dataclass(frozen=True)
class Keys:
    """Keys of a list's items: all that are known, those that must be there, and the words some may take."""

    known: tuple[str, ...]
    required: tuple[str, ...] = ()
    words: Mapping[str, tuple[str, ...]] | None = None


# The keys of Kubernetes' own structures. An API server drops unknown keys of such an item when it stores the
# object, so that a slip would change where pods run, and no message would say so.
_TOLERATION = Keys(
    known=("key", "operator", "value", "effect", "tolerationSeconds"),
    words={
        "operator": ("Exists", "Equal", "Lt", "Gt"),
        "effect": ("NoSchedule", "PreferNoSchedule", "NoExecute"),
    },
)
_SPREAD = Keys(
    known=(
        "maxSkew",
        "topologyKey",
        "whenUnsatisfiable",
        "labelSelector",
        "matchLabelKeys",
        "minDomains",
        "nodeAffinityPolicy",
        "nodeTaintsPolicy",
    ),
    required=("maxSkew", "topologyKey", "whenUnsatisfiable"),
    words={"whenUnsatisfiable": ("DoNotSchedule", "ScheduleAnyway")},
)
_MOUNT = Keys(
    known=(
        "name",
        "mountPath",
        "subPath",
        "subPathExpr",
        "readOnly",
        "recursiveReadOnly",
        "mountPropagation",
    ),
    required=("name", "mountPath"),
    # Any other needs rights that the pods of a run do not have.
    words={"mountPropagation": ("None", "HostToContainer")},
)
_VARIABLE = Keys(known=("name", "value", "valueFrom"), required=("name",))
_SECRET = Keys(known=("name",), required=("name",))
_TOPOLOGY: Final = (
    "kueue.x-k8s.io/podset-required-topology",
    "kueue.x-k8s.io/podset-preferred-topology",
    "kueue.x-k8s.io/podset-unconstrained-topology",
)
_AFFINITY = ("nodeAffinity", "podAffinity", "podAntiAffinity")
VALUE_KINDS: Final = ("configMapKeyRef", "secretKeyRef", "fieldRef", "resourceFieldRef")

Item = tuple[FieldPath, Mapping[str, Any]]


def _items(view: View, key: str) -> list[Item]:
    found = view.get(f"spec.template.{key}")
    return (
        [((*_TEMPLATE, key, index), item) for index, item in enumerate(found or ())]
        if found is not UNKNOWN
        else []
    )


def _check_keys(items: Sequence[Item], keys: Keys) -> Iterator[Problem]:
    for path, item in items:
        for key in item:
            if key not in keys.known:
                near = nearest(key, keys.known)
                known = f"Known here: {', '.join(keys.known)}"
                why = f"did you mean `{near}`? {known}" if near else ""
                yield Problem(
                    format_path((*path, key)),
                    "unknown key",
                    why,
                    "" if near else f"Remove it. {known}",
                )
        for key in keys.required:
            if item.get(key) in (None, ""):
                yield Problem(
                    format_path((*path, key)), "missing", "it has no default", f"Add `{key}`"
                )
        for key, words in (keys.words or {}).items():
            if key in item and item[key] not in words:
                near = nearest(item[key], words) if isinstance(item[key], str) else None
                remedy = (
                    f"Did you mean {near}? Write one of them" if near else "Write one of them"
                )
                what = f"{show(item[key])} is not one of {', '.join(words)}"
                yield Problem(format_path((*path, key)), what, "", remedy)


def check_scheduling(view: View) -> Iterator[Problem]:
    """Tolerations, affinity, spreading and the names of classes."""
    yield from _check_keys(_items(view, "tolerations"), _TOLERATION)
    yield from _check_keys(_items(view, "topologySpreadConstraints"), _SPREAD)
    affinity = view.get("spec.template.affinity")
    if isinstance(affinity, Mapping):
        yield from _check_keys([((*_TEMPLATE, "affinity"), affinity)], Keys(known=_AFFINITY))
    for key in ("priorityClassName", "runtimeClassName", "schedulerName"):
        name = view.get(f"spec.template.{key}")
        if isinstance(name, str) and not is_dns_subdomain(name):
            why = "it has lower-case letters, digits, '-' and '.'"
            yield Problem(
                f"spec.template.{key}", f"{show(name)} is not a valid name", why, "Correct it"
            )
    yield from _check_keys(_items(view, "imagePullSecrets"), _SECRET)


def check_topology(view: View) -> Iterator[Problem]:
    """Kueue's annotations for a topology: one of them, with the label of a node.

    Kueue leaves the mistake to an event of a pod that waits for ever.
    """
    found = view.raw(*_TEMPLATE, "annotations")
    annotations = found if isinstance(found, Mapping) else {}
    given = [key for key in _TOPOLOGY if key in annotations]
    for key in given[:-1]:
        path = format_path((*_TEMPLATE, "annotations", key))
        what = f"contradicts {given[-1]}"
        yield Problem(path, what, "a group of pods has one topology", "Remove one of them")
    for key in given:
        value = annotations[key]
        # The third asks for no topology at all, and is true or false.
        if key == _TOPOLOGY[2] or not isinstance(value, str):
            continue
        if (fault := fault_of_key(value)) is not None:
            path = format_path((*_TEMPLATE, "annotations", key))
            remedy = "Write the label of nodes that is a level of the Topology"
            yield Problem(path, *fault, remedy)


def check_volumes(view: View) -> Iterator[Problem]:
    """Each volume has a name and a source; each mount names a volume and a place of its own."""
    volumes, mounts = _items(view, "volumes"), _items(view, "volumeMounts")
    yield from _check_keys(mounts, _MOUNT)
    for path, volume in volumes:
        name, kinds = volume.get("name"), [key for key in volume if key != "name"]
        if not isinstance(name, str) or not is_dns_label(name):
            why = "a volume's name has lower-case letters, digits and '-'"
            yield Problem(
                format_path((*path, "name")),
                f"{show(name)} is not a valid name",
                why,
                "Correct it",
            )
        if len(kinds) != 1:
            what = "has no source" if not kinds else f"has several sources: {', '.join(kinds)}"
            remedy = "Give it exactly one, such as `emptyDir: {}` or `persistentVolumeClaim: {claimName: …}`"
            yield Problem(format_path(path), what, "a volume has exactly one", remedy)
        yield from _check_volume_kinds(path, volume, kinds)
    yield from _check_unique(volumes, "name")
    yield from _check_unique(mounts, "mountPath")

    # Names and mounts against each other, and against what the run itself has in its pods.
    names = dict.fromkeys(str(volume.get("name")) for _, volume in volumes)
    for path, mount in mounts:
        if isinstance(mount.get("name"), str) and mount["name"] and mount["name"] not in names:
            remedy = (
                f"Add it there, or use one of: {', '.join(names)}" if names else "Add it there"
            )
            what = (
                f"{show(mount['name'])} is not the name of a volume under spec.template.volumes"
            )
            yield Problem(format_path((*path, "name")), what, "", remedy)
        place = mount.get("mountPath")
        if (
            isinstance(place, str)
            and place
            and (not place.startswith("/") or ":" in place or ".." in place.split("/"))
        ):
            why = "a mount path is absolute, without ':' and '..'"
            yield Problem(
                format_path((*path, "mountPath")),
                f"{show(place)} cannot be mounted on",
                why,
                "Correct it",
            )
        elif isinstance(place, str) and hides_ours(place):
            why = f"the run itself has {', '.join(OUR_MOUNTS)}"
            yield Problem(
                format_path((*path, "mountPath")),
                f"{show(place)} is reserved",
                why,
                "Choose another place",
            )


def _check_volume_kinds(
    path: FieldPath, volume: Mapping[str, Any], kinds: Sequence[str]
) -> Iterator[Problem]:
    name, allowed = volume.get("name"), f"Allowed here: {', '.join(VOLUME_KINDS)}"
    if isinstance(name, str) and name.startswith(OUR_VOLUME_PREFIX):
        yield Problem(
            format_path((*path, "name")),
            f"the prefix {OUR_VOLUME_PREFIX} is reserved",
            "the run's own volumes have it",
            "Rename it",
        )
    for kind in kinds:
        if kind not in VOLUME_KINDS:
            near = nearest(kind, VOLUME_KINDS)
            why = (
                f"did you mean `{near}`? {allowed}"
                if near
                else "it reaches past what a pod of a run may touch"
            )
            yield Problem(
                format_path((*path, kind)),
                "not a volume that a run may have",
                why,
                "" if near else f"Use another. {allowed}",
            )

    # A projected volume could bring in by the back door what is refused as a volume of its own.
    sources = value_at(volume, ("projected", "sources"))
    for index, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        for kind in source if isinstance(source, Mapping) else ():
            if kind not in PROJECTED_KINDS:
                why = (
                    "the pods of a run talk to no API server"
                    if kind == "serviceAccountToken"
                    else ""
                )
                where = format_path((*path, "projected", "sources", index, kind))
                yield Problem(
                    where,
                    "not allowed here",
                    why,
                    f"Remove it. Allowed here: {', '.join(PROJECTED_KINDS)}",
                )


def _check_unique(items: Sequence[Item], key: str) -> Iterator[Problem]:
    first: dict[str, str] = {}
    for path, item in items:
        value = item.get(key)
        if isinstance(value, str) and first.setdefault(value, format_path(path)) != format_path(
            path
        ):
            what = f"{show(value)} is in {first[value]} already"
            yield Problem(format_path((*path, key)), what, "", "Rename or remove one of them")


def check_environment(view: View) -> Iterator[Problem]:
    """Variables have a text as their value, and none is one that the run itself sets."""
    items = _items(view, "env")
    yield from _check_keys(items, _VARIABLE)
    yield from _check_unique(items, "name")
    for path, item in items:
        name, value = item.get("name"), item.get("value")
        if name is not None and (
            not isinstance(name, str) or "=" in name or not name.isprintable()
        ):
            yield Problem(
                format_path((*path, "name")),
                f"{show(name)} is not a variable's name",
                "",
                "Correct it",
            )
        elif name in OUR_VARIABLES or str(name).startswith(OUR_VARIABLE_PREFIXES):
            why = "the run sets it for each of its processes"
            yield Problem(
                format_path((*path, "name")), f"{show(name)} is reserved", why, "Remove it"
            )
        if value is not None and not isinstance(value, str):
            why = "a variable is a text"
            yield Problem(
                format_path((*path, "value")),
                f"{show(value)} is not a text",
                why,
                f'Put it in quotes: "{show(value)}"',
            )
        if value is not None and item.get("valueFrom") is not None:
            yield Problem(
                format_path(path),
                "value and valueFrom are both set",
                "it is one of them",
                "Remove one of them",
            )
        yield from _check_value_from((*path, "valueFrom"), item.get("valueFrom"))


def _check_value_from(path: FieldPath, source: Any) -> Iterator[Problem]:
    if source is None:
        return

    # The API server checks the fields of a source, which its schema has; the kinds are checked here.
    known = f"Known here: {', '.join(VALUE_KINDS)}"
    if not isinstance(source, Mapping) or len(source) != 1:
        yield Problem(
            format_path(path),
            "does not name one source",
            "a variable comes from exactly one place",
            f"Name one. {known}",
        )
        return
    for kind in source:
        if kind not in VALUE_KINDS:
            near = nearest(kind, VALUE_KINDS)
            why = f"did you mean `{near}`? {known}" if near else ""
            yield Problem(
                format_path((*path, kind)),
                "not a source of a variable",
                why,
                "" if near else f"Use another. {known}",
            )


def check_reserved_keys(view: View) -> Iterator[Problem]:
    """The prefix of our labels is taken: by them the operator finds its pods."""
    for kind in ("labels", "annotations"):
        values = view.raw(*map(str, _TEMPLATE), kind)
        for key in values if isinstance(values, Mapping) else ():
            if str(key).startswith(LABEL_PREFIX):
                why = "the operator finds its pods by these"
                yield Problem(
                    format_path((*_TEMPLATE, kind, key)),
                    f"the prefix {LABEL_PREFIX} is reserved",
                    why,
                    "Rename it",
                )


RULES: Final = (
    check_scheduling,
    check_topology,
    check_volumes,
    check_environment,
    check_reserved_keys,
)
