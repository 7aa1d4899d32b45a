"""``spec.template``: the allowed part of a pod template, and checks for mistakes that Kubernetes would report
only for a pod that never starts."""

from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import Field

from evergrad_common.contract import LABEL_PREFIX
from evergrad_manifest.envelope.init_containers import (
    MOST_INIT_CONTAINERS,
    check_init_containers,
)
from evergrad_manifest.envelope.volumes import RULES as RULES_OF_VOLUMES
from evergrad_manifest.envelope.volumes import TEMPLATE
from evergrad_manifest.errors import Problem
from evergrad_manifest.model.base import FreeMapping, Section
from evergrad_manifest.model.environment import check_env_from, check_variables
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.items import Keys, check_keys, items_at
from evergrad_manifest.model.view import View
from evergrad_manifest.values.numbers import Whole, show
from evergrad_manifest.values.quantities import fault_of_key, is_dns_subdomain


class Template(Section):
    """The allowed part of a pod template, spelled as in Kubernetes; has no meaning for ``evergrad run``."""

    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the pods. The prefix ``evergrad.dev/`` is reserved."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the pods."""
    node_selector: dict[str, str] = Field(default_factory=dict)
    """Labels that a node of the cluster must have."""
    tolerations: tuple[FreeMapping, ...] = ()
    """Taints of nodes that the pods tolerate."""
    affinity: FreeMapping = Field(default_factory=dict)
    """Affinity to nodes and other pods."""
    topology_spread_constraints: tuple[FreeMapping, ...] = ()
    """How the pods spread over zones or hosts. A constraint without ``labelSelector`` counts the pods of the
    nodes of this run."""
    volumes: tuple[FreeMapping, ...] = ()
    """Volumes in addition to the volume of the run directory."""
    volume_mounts: tuple[FreeMapping, ...] = ()
    """Mounts of those volumes."""
    env: tuple[FreeMapping, ...] = ()
    """Environment variables of the training processes: ``name`` with ``value`` or ``valueFrom``."""
    env_from: tuple[FreeMapping, ...] = ()
    """ConfigMaps and Secrets whose keys become variables: ``configMapRef`` or ``secretRef``, with ``prefix``.
    Variables of ``env`` and of Evergrad take precedence."""
    init_containers: tuple[FreeMapping, ...] = Field(
        default=(), max_length=MOST_INIT_CONTAINERS
    )
    """Containers that run one after the other before the training starts: ``name``, ``image`` (default: the
    image of the run), ``command``, ``args``, ``workingDir``, ``env``, ``envFrom``, ``resources``,
    ``volumeMounts``."""
    service_account_name: str | None = Field(default=None, min_length=1)
    """Service account of the pods. The installation must allow it. Default: none."""
    priority_class_name: str | None = Field(default=None, min_length=1)
    """Priority class of the pods."""
    runtime_class_name: str | None = Field(default=None, min_length=1)
    """Container runtime of the pods."""
    scheduler_name: str | None = Field(default=None, min_length=1)
    """Scheduler of the pods."""
    image_pull_secrets: tuple[FreeMapping, ...] = ()
    """Secrets for pulling the image: ``name`` each."""
    termination_grace_period_seconds: Whole | None = Field(default=None, ge=10, le=86400)
    """Seconds that a pod has to save and leave before it is killed. Default: 30, and at least a script's
    ``gracePeriodSeconds`` + 5."""


# The keys of Kubernetes' own structures. An API server drops unknown keys of such an item when it stores the
# object, so a typing error would silently change where pods run.
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
_SECRET = Keys(known=("name",), required=("name",))
_TOPOLOGY: Final = (
    "kueue.x-k8s.io/podset-required-topology",
    "kueue.x-k8s.io/podset-preferred-topology",
    "kueue.x-k8s.io/podset-unconstrained-topology",
)
_AFFINITY = ("nodeAffinity", "podAffinity", "podAntiAffinity")


def check_scheduling(view: View) -> Iterator[Problem]:
    """Check tolerations, affinity, topology spread and the names of classes."""
    yield from check_keys(items_at(view, *TEMPLATE, "tolerations"), _TOLERATION)
    yield from check_keys(items_at(view, *TEMPLATE, "topologySpreadConstraints"), _SPREAD)
    affinity = view.get("spec.template.affinity")
    if isinstance(affinity, Mapping):
        yield from check_keys([((*TEMPLATE, "affinity"), affinity)], Keys(known=_AFFINITY))
    for key in ("priorityClassName", "runtimeClassName", "schedulerName"):
        name = view.get(f"spec.template.{key}")
        if isinstance(name, str) and not is_dns_subdomain(name):
            why = "it has lower-case letters, digits, '-' and '.'"
            yield Problem(
                f"spec.template.{key}",
                f"{show(name)} is not a valid name",
                why,
                "Correct it",
            )
    yield from check_keys(items_at(view, *TEMPLATE, "imagePullSecrets"), _SECRET)


def check_topology(view: View) -> Iterator[Problem]:
    """Check Kueue's annotations for a topology: at most one of them, with the label of a node.

    Kueue reports this mistake only in an event of a pod that waits forever.
    """
    found = view.raw(*TEMPLATE, "annotations")
    annotations = found if isinstance(found, Mapping) else {}
    given = [key for key in _TOPOLOGY if key in annotations]
    for key in given[:-1]:
        path = format_path((*TEMPLATE, "annotations", key))
        what = f"contradicts {given[-1]}"
        yield Problem(path, what, "a group of pods has one topology", "Remove one of them")
    for key in given:
        value = annotations[key]
        # The third annotation requests no topology at all, and is true or false.
        if key == _TOPOLOGY[2] or not isinstance(value, str):
            continue
        if (fault := fault_of_key(value)) is not None:
            path = format_path((*TEMPLATE, "annotations", key))
            remedy = "Write the label of nodes that is a level of the Topology"
            yield Problem(path, *fault, remedy)


def check_environment(view: View) -> Iterator[Problem]:
    """Check that the value of each variable is a text, and that the run does not set the variable itself."""
    yield from check_variables(items_at(view, *TEMPLATE, "env"))
    yield from check_env_from(items_at(view, *TEMPLATE, "envFrom"))


def check_reserved_keys(view: View) -> Iterator[Problem]:
    """Check that no key uses the prefix of our labels, by which the operator finds its pods."""
    for kind in ("labels", "annotations"):
        values = view.raw(*TEMPLATE, kind)
        for key in values if isinstance(values, Mapping) else ():
            if str(key).startswith(LABEL_PREFIX):
                why = "the operator finds its pods by these"
                yield Problem(
                    format_path((*TEMPLATE, kind, key)),
                    f"the prefix {LABEL_PREFIX} is reserved",
                    why,
                    "Rename it",
                )


RULES: Final = (
    check_scheduling,
    check_topology,
    *RULES_OF_VOLUMES,
    check_environment,
    check_init_containers,
    check_reserved_keys,
)
