"""Builds the parts of pods that come from the run's pod template.

The manifest's rules have already checked that the template contains only allowed fields.
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
"""Prefixes of labels and annotations that apply only to pods that train: a place in a queue or gang, a
network device, a port to scrape, a security profile of the container. They are not copied to the
coordinator."""


def build_user_labels(run: ParsedRun) -> dict[str, str]:
    """Build the labels that come from the user.

    These are the template's labels, the run's labels that are passed on, and the label of a gang if the
    template names a scheduler.
    """
    template = run.spec.template
    # Assume that a scheduler named by the user supports gangs.
    gang = {names.LABEL_GANG: run.name} if template.scheduler_name else {}
    passed = {key: run.labels[key] for key in names.PROPAGATED_LABELS if key in run.labels}
    return {**gang, **passed, **template.labels}


def build_scheduling(
    run: ParsedRun, *, is_on_one_host: bool = False, avoided: Sequence[str] = ()
) -> dict[str, Any]:
    """Build the scheduling fields of a pod's spec from the template, without tolerations.

    ``is_on_one_host``: whether the run's volume requires all pods on the same host. ``avoided``: hosts that
    the pod should avoid if other hosts are available.
    """
    template = run.spec.template
    affinity = _avoid(template.affinity, avoided)

    # If required, place the pod on the host of the run's other pods. The first pod may run on any host.
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
        # Add a selector of the run's nodes, because a constraint without a selector counts no pods.
        "topologySpreadConstraints": [
            {**ours, **constraint} for constraint in template.topology_spread_constraints
        ],
        "priorityClassName": template.priority_class_name,
        "runtimeClassName": template.runtime_class_name,
        "schedulerName": template.scheduler_name,
    }


def _avoid(affinity: Mapping[str, Any], avoided: Sequence[str]) -> Mapping[str, Any]:
    """Return the affinity with a preference for hosts that are not in ``avoided``."""
    # Use a preference, so that the pod still runs if there are no other hosts. Match the field metadata.name,
    # because a host's label may differ from its name. The API server allows only one value for each field.
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
    """Return the affinity that requires this host, in each of its alternative terms."""
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
    """Build the scheduling fields of a pod that prepares data or evaluates.

    The pod runs on hosts that match ``selector``; if it is None, on hosts on which the coordinator may run.
    It avoids the ``avoided`` hosts if possible.
    """
    placement = build_coordinator_placement(run)
    # The pod runs the run's code, so use the same sandbox as the nodes. With a selector, drop the runtime
    # class, because hosts of another kind may lack it.
    placement["runtimeClassName"] = run.spec.template.runtime_class_name
    if selector is not None:
        placement |= {
            "nodeSelector": dict(selector),
            "affinity": {},
            "runtimeClassName": None,
        }
    return {**placement, "affinity": _avoid(placement["affinity"], avoided)}


def build_coordinator_placement(run: ParsedRun) -> dict[str, Any]:
    """Build the scheduling fields of the coordinator's pod.

    The coordinator may run on the same hosts as the nodes, because the template selects the run's hosts. The
    template's rules between pods apply only to nodes.
    """
    template = run.spec.template
    placement = template.affinity.get("nodeAffinity")
    return {
        "nodeSelector": dict(template.node_selector),
        "affinity": {"nodeAffinity": placement} if placement else {},
        "priorityClassName": template.priority_class_name,
    }


def build_coordinator_metadata(run: ParsedRun) -> tuple[dict[str, str], dict[str, str]]:
    """Build the labels and annotations of the template that the coordinator's pod also gets.

    For example, an annotation that disables the injection of sidecars.
    """
    template = run.spec.template
    between = [
        template.affinity.get("podAffinity"),
        template.affinity.get("podAntiAffinity"),
    ]
    # Leave out labels by which the template's constraints count pods. Otherwise the coordinator would count
    # as a node and take a node's host or zone.
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
    """Return the keys of all labels in selectors anywhere in ``value``."""
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
    """Return our default variables and the user's variables. The user's value takes precedence."""
    theirs = {variable.get("name") for variable in given}
    defaults = [
        {"name": name, "value": value} for name, value in ours.items() if name not in theirs
    ]
    # Put the defaults first, so that the user's variables can refer to them.
    return [*defaults, *given]
