"""The allowed part of a pod template, as it is added to a node's pod.

The manifest's rules have checked that it is allowed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.raw import get_map, get_maps, get_text
from evergrad_operator.core.observe.spec import ParsedRun

_HOST: Final = "kubernetes.io/hostname"
_OF_NODES: Final = (
    "kueue.x-k8s.io/",
    "scheduling.x-k8s.io/",
    "scheduling.k8s.io/",
    "scheduling.volcano.sh/",
    "k8s.v1.cni.cncf.io/",
    "prometheus.io/",
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
)
"""Prefixes of labels and annotations that are for a pod that trains: a place in a queue or gang, a network
device, a port to scrape, a profile for a container of this name. The coordinator has none of these."""


def build_user_labels(run: ParsedRun) -> dict[str, str]:
    """Build the labels that come from the user: the template's, those of the run that are passed on, and a
    gang's where another scheduler is named."""
    template = run.spec.template
    # A scheduler that was named is taken to be one that knows gangs.
    gang = {names.LABEL_GANG: run.name} if template.scheduler_name else {}
    passed = {key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels}
    return {**gang, **passed, **template.labels}


def build_scheduling(
    run: ParsedRun, *, is_on_one_host: bool = False, avoided: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the template's part of a pod's spec, but for tolerations, volumes and secrets, and the affinity
    that the run's volume demands.

    ``avoided``: hosts that the pod should keep away from if it can.
    """
    template = run.spec.template
    affinity = _avoid(template.affinity, avoided)

    # A requirement: the host of the run's other pods. The first pod may go anywhere.
    of_run = {
        names.LABEL_RUN: run.name,
        names.LABEL_ROLE: names.ROLE_NODE,
    }
    ours = {"labelSelector": {"matchLabels": of_run}}
    if is_on_one_host:
        between = dict(affinity.get("podAffinity") or {})
        required = between.get("requiredDuringSchedulingIgnoredDuringExecution") or ()
        between["requiredDuringSchedulingIgnoredDuringExecution"] = [
            *required,
            {**ours, "topologyKey": _HOST},
        ]
        affinity = {**affinity, "podAffinity": between}
    return {
        "nodeSelector": dict(template.node_selector),
        "affinity": affinity,
        # Without a selector a constraint counts no pod at all, which nobody means.
        "topologySpreadConstraints": [
            {**ours, **constraint} for constraint in template.topology_spread_constraints
        ],
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "schedulerName": template.scheduler_name,
    }


def _avoid(affinity: Mapping[str, Any], avoided: Sequence[str]) -> Mapping[str, Any]:
    """Return the affinity with the wish for other hosts than those."""
    # A wish and no requirement: where there are no other hosts, the pod runs all the same. By the field,
    # because a host's label may differ from its name; the API server takes one value of a field at a time.
    if not avoided:
        return affinity
    nodes = dict(affinity.get("nodeAffinity") or {})
    wished = nodes.get("preferredDuringSchedulingIgnoredDuringExecution") or ()
    others = [
        {
            "key": "metadata.name",
            "operator": "NotIn",
            "values": [host],
        }
        for host in avoided
    ]
    wish = {"weight": 100, "preference": {"matchFields": others}}
    nodes["preferredDuringSchedulingIgnoredDuringExecution"] = [*wished, wish]
    return {**affinity, "nodeAffinity": nodes}


def require_host(affinity: Mapping[str, Any], host: str) -> Mapping[str, Any]:
    """Return the affinity with the demand for this host, in each of its alternatives."""
    nodes = dict(affinity.get("nodeAffinity") or {})
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    this = {"key": "metadata.name", "operator": "In", "values": [host]}
    terms = get_maps(get_map(nodes, key), "nodeSelectorTerms") or [{}]
    demanded = [
        {**term, "matchFields": [*get_maps(term, "matchFields"), this]} for term in terms
    ]
    nodes[key] = {"nodeSelectorTerms": demanded}
    return {**affinity, "nodeAffinity": nodes}


def build_placement_beside(
    run: ParsedRun, selector: Mapping[str, str] | None, *, avoided: Sequence[str]
) -> dict[str, Any]:
    """Build the part of a pod's spec that places it beside the nodes: where ``selector`` says, else where the
    coordinator may run, and away from ``avoided`` hosts if that is possible."""
    placement = build_coordinator_placement(run)
    # A sandbox is for the code and data of the run, which are here, too; hosts of another kind may lack it.
    placement["runtimeClassName"] = run.spec.template.runtime_class_name
    if selector is not None:
        placement |= {
            "nodeSelector": dict(selector),
            "affinity": {},
            "runtimeClassName": None,
        }
    return {**placement, "affinity": _avoid(placement["affinity"], avoided)}


def build_coordinator_placement(run: ParsedRun) -> dict[str, Any]:
    """Build the coordinator's part of a pod's spec: it may run on the hosts on which the nodes may, because
    the template says which hosts are the run's, and of which kind.

    Rules of the template about pods among each other are for the nodes alone.
    """
    template = run.spec.template
    placement = template.affinity.get("nodeAffinity")
    return {
        "nodeSelector": dict(template.node_selector),
        "affinity": {"nodeAffinity": placement} if placement else {},
        "priorityClassName": template.priority_class_name,
    }


def build_coordinator_metadata(run: ParsedRun) -> tuple[dict[str, str], dict[str, str]]:
    """Build the labels and annotations of the template that the coordinator has, too, such as those that keep
    sidecars out of a pod."""
    template = run.spec.template
    between = [
        template.affinity.get("podAffinity"),
        template.affinity.get("podAntiAffinity"),
    ]
    # The coordinator is no node: with a label by which the template's own constraints count pods it would
    # take a node's host or zone.
    counted = _find_selected([*between, *template.topology_spread_constraints])
    labels = {
        key: value
        for key, value in template.labels.items()
        if key not in counted and not key.startswith(_OF_NODES)
    }
    annotations = {
        key: value
        for key, value in template.annotations.items()
        if not key.startswith(_OF_NODES)
    }
    return labels, annotations


def _find_selected(value: Any) -> set[str]:
    """Find the keys of labels in the selectors anywhere in ``value``."""
    if isinstance(value, (list, tuple)):
        return {key for item in value for key in _find_selected(item)}
    if not isinstance(value, Mapping):
        return set()
    found = {key for item in value.values() for key in _find_selected(item)}
    found.update(get_map(value, "matchLabels"))
    found.update(get_text(one, "key") for one in get_maps(value, "matchExpressions"))
    for name in ("matchLabelKeys", "mismatchLabelKeys"):
        found.update(value.get(name) or ())
    return found


def merge_env(
    ours: dict[str, str], given: tuple[Mapping[str, Any], ...]
) -> list[Mapping[str, Any]]:
    """Return our defaults and the user's variables; one that the user sets is the user's."""
    theirs = {variable.get("name") for variable in given}
    defaults = [
        {"name": name, "value": value} for name, value in ours.items() if name not in theirs
    ]
    # Defaults come first, so that the user's variables may refer to them.
    return [*defaults, *given]
