"""The checks of ``evergrad doctor``: each returns one result, with a remedy. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.render.text import age, parse_time

OLDEST_KUBERNETES: Final = (1, 30)
CRD_NAME: Final = "trainingruns.evergrad.dev"
VERSION: Final = "v1alpha1"
_DEFAULT_CLASS: Final = "storageclass.kubernetes.io/is-default-class"
_ENFORCE: Final = "pod-security.kubernetes.io/enforce"
# Provisioners are listed by name, because a StorageClass has no field for the access modes of its volumes.
_ONE_NODE_PROVISIONERS: Final = (
    "ebs.csi.aws.com",
    "kubernetes.io/aws-ebs",
    "pd.csi.storage.gke.io",
    "kubernetes.io/gce-pd",
    "disk.csi.azure.com",
    "kubernetes.io/azure-disk",
    "rancher.io/local-path",
    "docker.io/hostpath",
    "k8s.io/minikube-hostpath",
    "kubernetes.io/no-provisioner",
    "topolvm.io",
    "dobs.csi.digitalocean.com",
    "csi.hetzner.cloud",
    "cinder.csi.openstack.org",
)
"""Provisioners of volumes that only one node at a time may write."""

_DEMANDED: Final = frozenset(
    f"{kind}{name}" for kind in ("", "requests.", "limits.") for name in ("cpu", "memory")
)
"""Resources of a quota for which Kubernetes refuses pods that do not set them. Other resources, such as
storage and accelerators, are only counted."""


class CheckState(StrEnum):
    """Outcome of a check. ``skip``: the check was not made, for the reason in the message."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"
    SKIP = "skip"


@dataclass(frozen=True)
class Check:
    """One line of ``doctor``. ``remedy`` is empty if the user does not need to act."""

    name: str
    state: CheckState
    message: str
    remedy: str = ""


def check_version(raw: Mapping[str, Any], host: str) -> Check:
    """Check the version of the API server, from ``/version``."""
    text = str(raw.get("gitVersion", "unknown"))

    # Read digits only: vendors add suffixes, for example ``34+`` for the minor version.
    marked = [str(raw.get(key, "")) for key in ("major", "minor")]
    numbers = ["".join(filter(str.isdigit, text)) for text in marked]
    if not all(numbers):
        return Check(
            "api server",
            CheckState.WARN,
            f"{host} answers without a version",
            "Evergrad needs Kubernetes 1.30 or newer",
        )
    if tuple(int(number) for number in numbers) < OLDEST_KUBERNETES:
        return Check(
            "api server",
            CheckState.FAIL,
            f"Kubernetes {text} is too old",
            "Evergrad needs 1.30 or newer",
        )
    return Check("api server", CheckState.OK, f"Kubernetes {text} at {host}")


def check_crd(raw: Mapping[str, Any] | None, *, is_served: bool, may_read: bool) -> Check:
    """Check the CustomResourceDefinition. ``is_served``: whether discovery lists TrainingRuns of our
    version."""
    install = (
        "Install or upgrade the chart: helm upgrade --install evergrad charts/evergrad"
    )
    # Discovery decides, not the object: a CRD may be stored but not served, for example while it is being
    # deleted.
    if not is_served:
        what = (
            f"{CRD_NAME} is not installed"
            if raw is None
            else f"{CRD_NAME} does not serve {VERSION}"
        )
        return Check("crd", CheckState.FAIL, what, install)
    if raw is None:
        why = "" if may_read else "; this user may not read its schema"
        return Check("crd", CheckState.OK, f"{VERSION} is served{why}")
    versions = part(raw, "spec").get("versions") or ()
    ours: Mapping[str, Any] = next(
        (version for version in versions if version.get("name") == VERSION), {}
    )
    schema = part(ours, "schema", "openAPIV3Schema", "properties")
    known = part(schema, "spec", "properties")

    # The API server refuses or drops a field at submit if the stored CRD lacks it. Import the models here,
    # because the import takes longer than all other checks together.
    from evergrad_manifest.envelope import Spec
    from evergrad_manifest.model.fields import fields_of

    missing = sorted(set(fields_of(Spec)) - set(known)) if known else []
    if missing:
        what = f"it is older than this command: it lacks spec.{', spec.'.join(missing)}"
        return Check("crd", CheckState.WARN, what, install)
    # Without the status subresource, the API server refuses each status that the operator writes.
    if "status" not in (ours.get("subresources") or {}):
        return Check("crd", CheckState.FAIL, "it has no status subresource", install)
    return Check(
        "crd", CheckState.OK, f"{VERSION} is served, with every field of this command"
    )


def check_operator(deployments: Sequence[Mapping[str, Any]] | None, version: str) -> Check:
    """Check the operator's Deployments, None if this user may not list them. ``version``: the version of this
    command."""
    if deployments is None:
        return Check(
            "operator",
            CheckState.SKIP,
            "this user may not list Deployments",
            "Name its namespace: --operator-namespace",
        )
    if not deployments:
        remedy = "Install the chart: helm upgrade --install evergrad charts/evergrad"
        return Check(
            "operator", CheckState.FAIL, "no Deployment of the operator was found", remedy
        )
    for raw in deployments:
        if (part(raw, "status").get("availableReplicas") or 0) < 1:
            remedy = f"kubectl -n {_namespace(raw)} describe deployment {_name(raw)}"
            return Check(
                "operator",
                CheckState.FAIL,
                f"{_namespace(raw)}/{_name(raw)} is not available",
                remedy,
            )

    # Warn and do not fail: running training does not depend on either version.
    shown = ", ".join(f"{_namespace(raw)}/{_name(raw)}" for raw in deployments)
    labels = part(deployments[0], "metadata", "labels")
    other = labels.get("app.kubernetes.io/version")
    if other and other != version:
        remedy = "Upgrade the older of the two; running training is not restarted"
        return Check(
            "operator",
            CheckState.WARN,
            f"{shown} is of version {other}, this command of {version}",
            remedy,
        )
    return Check("operator", CheckState.OK, f"{shown} is available")


def check_lease(leases: Sequence[Mapping[str, Any]] | None, *, now: float) -> Check:
    """Check that an operator renews the lease in its namespace. ``now``: Unix seconds of this machine."""
    if leases is None:
        return Check("operator lease", CheckState.SKIP, "this user may not read Leases")
    if not leases:
        remedy = "Is the operator just starting? If not, look at its log"
        return Check(
            "operator lease", CheckState.WARN, "no operator has taken its lease", remedy
        )
    # There may be leases of operators for other namespaces, or a lease of an old installation.
    newest = max(
        leases, key=lambda raw: parse_time(part(raw, "spec").get("renewTime")) or 0.0
    )
    spec = newest.get("spec") or {}
    renewed, seconds = (
        parse_time(spec.get("renewTime")),
        spec.get("leaseDurationSeconds") or 15,
    )
    holder = spec.get("holderIdentity") or "no operator"
    # An operator that ends clears the holder, so that the next operator does not have to wait until the lease
    # expires.
    if renewed is None or not spec.get("holderIdentity"):
        return Check(
            "operator lease",
            CheckState.WARN,
            "no operator holds it",
            "Is the operator just starting? If not, look at its log",
        )
    # Allow three times the duration, because the clocks of two machines differ.
    if now - renewed > 3 * seconds:
        remedy = f"Look at the operator's log: kubectl -n {_namespace(newest)} get pods"
        return Check(
            "operator lease",
            CheckState.FAIL,
            f"{holder} renewed it {age(now - renewed)} ago; no operator acts on runs",
            remedy,
        )
    return Check(
        "operator lease",
        CheckState.OK,
        f"held by {holder}, renewed {age(now - renewed)} ago",
    )


@dataclass(frozen=True)
class Right:
    """One permission that a user may need. ``is_needed``: a run cannot be used without it."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    purpose: str = ""
    is_needed: bool = False

    def __str__(self) -> str:
        resource = (
            f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        )
        return f"{self.verb} {resource}"


_RUNS: Final = ("evergrad.dev", "trainingruns")
# Each permission has the command that needs it, so that a user can decide whether it matters.
RIGHTS: Final = (
    Right("get", *_RUNS, purpose="status, wait", is_needed=True),
    Right("list", *_RUNS, purpose="list, top, prune", is_needed=True),
    Right("create", *_RUNS, purpose="submit", is_needed=True),
    Right("patch", *_RUNS, purpose="submit, suspend, resume, restart", is_needed=True),
    Right("delete", *_RUNS, purpose="prune, kubectl delete"),
    Right("list", "", "pods", purpose="status, logs, open, prune"),
    Right("get", "", "pods", "log", purpose="logs"),
    Right("list", "", "events", purpose="status"),
    Right("get", "", "persistentvolumeclaims", purpose="checkpoints"),
    Right("list", "", "persistentvolumeclaims", purpose="prune"),
    Right("delete", "", "persistentvolumeclaims", purpose="prune"),
    Right("get", "", "secrets", purpose="open"),
    Right("get", "", "pods", "portforward", purpose="open"),
    Right("create", "", "pods", "portforward", purpose="open"),
)


def check_rights(allowed: Mapping[Right, bool | None], namespace: str) -> Check:
    """Check the API server's answer about each right, None if there was no answer."""
    name = "your rights"

    def show(answer: bool | None) -> str:
        found = [right for right, is_allowed in allowed.items() if is_allowed is answer]
        return ", ".join(f"{right} (for {right.purpose})" for right in found)

    lacking, unasked = show(False), show(None)
    if not lacking and not unasked:
        what = f"all commands are allowed in namespace {namespace}"
        return Check(name, CheckState.OK, what)
    unasked = f"could not be asked: {unasked}" if unasked else ""
    if not lacking:
        return Check(name, CheckState.SKIP, unasked, "Try again")
    # Warn if only some commands lack a right: a user who may only watch runs can still use the other
    # commands.
    is_failure = any(right.is_needed for right in allowed if allowed[right] is False)
    message = f"not allowed in namespace {namespace}: {lacking}"
    return Check(
        name,
        CheckState.FAIL if is_failure else CheckState.WARN,
        f"{message}; {unasked}" if unasked else message,
        "Ask for a RoleBinding to the ClusterRole edit in this namespace",
    )


def check_storage(classes: Sequence[Mapping[str, Any]] | None) -> Check:
    """Check the StorageClasses: there should be a default class whose volumes several nodes may write."""
    if classes is None:
        return Check("storage", CheckState.SKIP, "this user may not list StorageClasses")
    shared = (
        "Name one that allows ReadWriteMany in spec.storage.storageClassName, or an existing claim "
        "in spec.storage.claimName"
    )
    defaults = [
        raw
        for raw in classes
        if part(raw, "metadata", "annotations").get(_DEFAULT_CLASS) == "true"
    ]
    if not classes:
        return Check(
            "storage",
            CheckState.FAIL,
            "there is no StorageClass",
            "Install one that allows ReadWriteMany, or use spec.storage.claimName",
        )
    if not defaults:
        return Check(
            "storage",
            CheckState.WARN,
            f"none of {', '.join(map(_name, classes))} is the default",
            shared,
        )

    # Kubernetes uses the newest of several defaults. A class has no field for its access modes.
    name, provisioner = _name(defaults[-1]), str(defaults[-1].get("provisioner", ""))
    if provisioner in _ONE_NODE_PROVISIONERS:
        what = (
            f"volumes of the default {name} ({provisioner}) belong to one node; runs of several need "
            "ReadWriteMany"
        )
        return Check("storage", CheckState.WARN, what, shared)
    text = (
        f"default {name} ({provisioner}); a class does not show whether it allows ReadWriteMany, its "
        "first volume will"
    )
    return Check("storage", CheckState.OK, text)


def check_namespace(
    raw: Mapping[str, Any] | None, namespace: str, *, may_read: bool
) -> Check:
    """Check the namespace and its Pod Security labels. The pods of a run meet the strictest level."""
    if not may_read:
        return Check(
            "namespace", CheckState.SKIP, f"this user may not read namespace {namespace}"
        )
    if raw is None:
        return Check(
            "namespace",
            CheckState.FAIL,
            f"{namespace} does not exist",
            f"kubectl create namespace {namespace}",
        )
    if part(raw, "status").get("phase") == "Terminating":
        return Check(
            "namespace",
            CheckState.FAIL,
            f"{namespace} is being deleted",
            "Name another with -n",
        )

    # Show the level but do not judge it: the pods of a run meet the strictest level.
    level = part(raw, "metadata", "labels").get(_ENFORCE)
    told = f"enforces Pod Security {level}" if level else "enforces no Pod Security level"
    return Check(
        "namespace", CheckState.OK, f"{namespace} {told}; a run's pods meet restricted"
    )


@dataclass(frozen=True)
class QuotaLimits:
    """The defaults and the bounds that the LimitRanges of a namespace set for each container.

    Resources are named as in a quota, for example ``limits.memory``.
    """

    defaults: frozenset[str] = frozenset()
    most: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """By resource: the bound, and the name of the LimitRange that sets it."""


def read_limits(ranges: Sequence[Mapping[str, Any]]) -> QuotaLimits:
    """Return the limits that the LimitRanges of a namespace set."""
    defaults: set[str] = set()
    most: dict[str, tuple[str, str]] = {}
    for raw in ranges:
        for item in part(raw, "spec").get("limits") or ():
            if item.get("type") not in ("Container", "Pod"):
                continue
            # A default limit is also the default request if the LimitRange sets no default request.
            asked = set(item.get("defaultRequest") or ()) | set(item.get("default") or ())
            defaults |= {f"limits.{name}" for name in item.get("default") or ()}
            defaults |= {f"requests.{name}" for name in asked} | asked
            for name, bound in (item.get("max") or {}).items():
                known = most.get(name)
                if known is None or quantity_of(bound) < quantity_of(known[0]):
                    most[name] = str(bound), _name(raw)
    return QuotaLimits(frozenset(defaults), most)


def check_limits(
    ranges: Sequence[Mapping[str, Any]] | None, coordinator: Mapping[str, str]
) -> Check:
    """Check whether a run's coordinator fits into the LimitRanges of the namespace.

    ``coordinator``: its limits by resource, which the installation sets.
    """
    if ranges is None:
        return Check("limit range", CheckState.SKIP, "this user may not list LimitRanges")
    if not ranges:
        return Check("limit range", CheckState.OK, "there is none")
    limits = read_limits(ranges)
    refused = [
        f"{limits.most[name][1]} allows at most {limits.most[name][0]} of {name}, and the coordinator of "
        f"each run has a limit of {amount}"
        for name, amount in sorted(coordinator.items())
        if name in limits.most and quantity_of(amount) > quantity_of(limits.most[name][0])
    ]
    if refused:
        remedy = (
            "Raise the LimitRange's max, or lower runs.coordinator.memoryLimit of the chart"
        )
        return Check("limit range", CheckState.FAIL, "; ".join(refused), remedy)
    shown = [
        f"at most {bound} of {name} ({of})"
        for name, (bound, of) in sorted(limits.most.items())
    ]
    if limits.defaults:
        shown.append("containers that set no limits get the defaults of the LimitRange")
    return Check("limit range", CheckState.OK, "; ".join(shown) or "it bounds no container")


def check_quotas(
    quotas: Sequence[Mapping[str, Any]] | None,
    *,
    defaults: Collection[str] = (),
    waiting: Sequence[tuple[str, str]] = (),
) -> Check:
    """Check whether the ResourceQuotas of the namespace have room.

    ``defaults``: resources that a LimitRange sets if a run does not. ``waiting``: runs that wait for a quota,
    each with its message.
    """
    if quotas is None:
        return Check("quota", CheckState.SKIP, "this user may not list ResourceQuotas")
    if not quotas:
        return Check("quota", CheckState.OK, "there is none")
    # Use the status, which a controller fills in, or the spec until the controller has done so.
    full, wanted = [], set()
    for raw in quotas:
        used = part(raw, "status", "used")
        limits = part(raw, "status", "hard") or part(raw, "spec", "hard")
        for resource, hard in limits.items():
            wanted.add(resource)
            if quantity_of(used.get(resource, "0")) >= quantity_of(hard):
                full.append(
                    f"{resource} ({used.get(resource, 0)} of {hard} in {_name(raw)})"
                )
    if full:
        return Check(
            "quota",
            CheckState.WARN,
            f"used up: {', '.join(full)}",
            "Runs wait until some is free. Otherwise have it raised",
        )

    # A quota may have room, but less than a run requests.
    if waiting:
        name, message = waiting[0]
        others = f", and {len(waiting) - 1} more runs" if len(waiting) > 1 else ""
        return Check(
            "quota",
            CheckState.WARN,
            f"run {name} waits for room{others}: {message}",
            "Free some, have it raised, or lower spec.resources or spec.nodes.min",
        )

    demanded = ", ".join(sorted((wanted & _DEMANDED) - set(defaults)))
    what = f"; each run must set {demanded} in spec.resources" if demanded else ""
    return Check("quota", CheckState.OK, f"there is room{what}")


def quantity_of(text: Any) -> float:
    """Return a quantity as a number; 0 if it is not a valid quantity."""
    from evergrad_manifest.values.quantities import quantity_value

    try:
        return float(quantity_value(str(text)))
    except ValueError:
        return 0.0


def check_network(policies: Sequence[Mapping[str, Any]] | None) -> Check:
    """Check for NetworkPolicies in the namespace that could cut a run's pods off from each other or from
    DNS."""
    if policies is None:
        return Check("network", CheckState.SKIP, "this user may not list NetworkPolicies")
    # Skip the operator's own policies, which let the pods of a run reach each other.
    others = [
        raw for raw in policies if "evergrad.dev/run" not in part(raw, "metadata", "labels")
    ]
    closing = [
        _name(raw) for raw in others if _selects_all(raw) and "Egress" in _types(raw)
    ]
    if closing:
        what = f"{', '.join(closing)} limits what all pods may reach"
        remedy = (
            "Let pods with the label evergrad.dev/run reach each other (all ports) and DNS"
        )
        return Check("network", CheckState.WARN, what, remedy)
    # Policies are additive: traffic that one policy allows is allowed, and each run's own policy lets its
    # pods in.
    incoming = [
        _name(raw) for raw in others if _selects_all(raw) and "Ingress" in _types(raw)
    ]
    if incoming:
        what = (
            f"{', '.join(incoming)} limits what may reach pods; the policy of each run lets "
            "its own pods in"
        )
        return Check("network", CheckState.OK, what)
    return Check("network", CheckState.OK, "no NetworkPolicy restricts the pods of a run")


def _selects_all(raw: Mapping[str, Any]) -> bool:
    selector = part(raw, "spec", "podSelector")
    return not selector.get("matchLabels") and not selector.get("matchExpressions")


def _types(raw: Mapping[str, Any]) -> Collection[str]:
    # These are Kubernetes' defaults for a policy without policyTypes.
    spec = part(raw, "spec")
    default = ("Ingress", "Egress") if "egress" in spec else ("Ingress",)
    return spec.get("policyTypes") or default


def check_nodes(nodes: Sequence[Mapping[str, Any]] | None) -> Check:
    """Check the machines of the cluster: the number of ready nodes, and their accelerators."""
    if nodes is None:
        return Check("nodes", CheckState.SKIP, "this user may not list nodes")
    ready = [
        raw
        for raw in nodes
        if not part(raw, "spec").get("unschedulable")
        and any(
            (one.get("type"), one.get("status")) == ("Ready", "True")
            for one in part(raw, "status").get("conditions") or ()
        )
    ]
    # A cordoned node may be ready but gets no new pods, so it does not count.
    if not ready:
        return Check(
            "nodes", CheckState.FAIL, f"none of {len(nodes)} is ready", "kubectl get nodes"
        )
    # Extended resources have a vendor's prefix. Resources of a node that is not ready cannot be used.
    devices: dict[str, float] = {}
    for raw in ready:
        for resource, number in part(raw, "status", "allocatable").items():
            if "/" in resource and quantity_of(number) > 0:
                devices[resource] = devices.get(resource, 0.0) + quantity_of(number)
    shown = (
        ", ".join(f"{number:g} {resource}" for resource, number in sorted(devices.items()))
        or "no accelerators"
    )
    state = CheckState.OK if len(ready) == len(nodes) else CheckState.WARN
    remedy = "" if state is CheckState.OK else "kubectl get nodes"
    return Check("nodes", state, f"{len(ready)} of {len(nodes)} ready; {shown}", remedy)


def check_groups(groups: Collection[str]) -> list[Check]:
    """Check optional parts of the cluster by its API groups: metrics, Prometheus Operator, gang
    schedulers."""
    # None of them is required, so no result here is a failure.
    metrics = (
        Check("metrics api", CheckState.OK, "evergrad top shows CPU and memory")
        if "metrics.k8s.io" in groups
        else Check(
            "metrics api",
            CheckState.WARN,
            "none: evergrad top shows no CPU and memory",
            "Install metrics-server if you want them",
        )
    )
    monitoring = (
        Check(
            "monitoring",
            CheckState.OK,
            "a Prometheus operator is installed; the chart has no monitors: select the port named metrics",
        )
        if "monitoring.coreos.com" in groups
        else Check(
            "monitoring",
            CheckState.OK,
            "no Prometheus operator; metrics can be scraped from the pods' port named metrics",
        )
    )

    # List only the schedulers that change how the pods of a run are placed.
    gangs = {"kueue.x-k8s.io": "Kueue", "scheduling.x-k8s.io": "coscheduling"}
    found = [name for group, name in gangs.items() if group in groups]
    text = (
        f"{', '.join(found)} found"
        if found
        else "none; the pods of a run are scheduled one by one, which is sufficient"
    )
    if "scheduling.volcano.sh" in groups:
        text += "; Volcano is installed too, but runs do not use it"
    return [metrics, monitoring, Check("gang scheduling", CheckState.OK, text)]


def _name(raw: Mapping[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("name", ""))


def _namespace(raw: Mapping[str, Any]) -> str:
    return str((raw.get("metadata") or {}).get("namespace", ""))
