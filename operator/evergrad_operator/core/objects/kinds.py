"""The paths of objects of each kind on the API server, as a table, so that discovery costs no request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from evergrad_common import contract
from evergrad_operator.core.objects.errors import OperatorError

Raw = Mapping[str, Any]
"""An object as the API server sends it."""


@dataclass(frozen=True)
class Kind:
    """One kind of object, with its API version and its plural in paths."""

    kind: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the URL's path; of the whole cluster if ``namespace`` is None."""
        parts = ["api" if "/" not in self.version else "apis", self.version]
        parts += ["namespaces", quote(namespace, safe="")] if namespace else []
        parts += [part for part in (self.plural, quote(name, safe=""), subresource) if part]
        return "/" + "/".join(parts)


RUN: Final = Kind(contract.KIND, contract.API_VERSION, "trainingruns")
POD: Final = Kind("Pod", "v1", "pods")
SERVICE: Final = Kind("Service", "v1", "services")
CONFIG_MAP: Final = Kind("ConfigMap", "v1", "configmaps")
CLAIM: Final = Kind("PersistentVolumeClaim", "v1", "persistentvolumeclaims")
SECRET: Final = Kind("Secret", "v1", "secrets")
EVENT: Final = Kind("Event", "v1", "events")
BUDGET: Final = Kind("PodDisruptionBudget", "policy/v1", "poddisruptionbudgets")
NETWORK_POLICY: Final = Kind("NetworkPolicy", "networking.k8s.io/v1", "networkpolicies")
LEASE: Final = Kind("Lease", "coordination.k8s.io/v1", "leases")
ACCESS_REVIEW: Final = Kind(
    "SelfSubjectAccessReview", "authorization.k8s.io/v1", "selfsubjectaccessreviews"
)
WEBHOOK: Final = Kind(
    "ValidatingWebhookConfiguration",
    "admissionregistration.k8s.io/v1",
    "validatingwebhookconfigurations",
)
EARLY_WEBHOOK: Final = Kind(
    "MutatingWebhookConfiguration",
    "admissionregistration.k8s.io/v1",
    "mutatingwebhookconfigurations",
)
READINESS: Final = Kind("Readiness", "", "readyz")
"""Readiness endpoint of the API server, which is not an object."""
API_RESOURCES: Final = "APIResourceList"
"""The kind of an answer of discovery, which lists the kinds of an API group."""
POD_GROUP: Final = "PodGroup"
POD_GROUPS: Final[Mapping[str, tuple[Kind, ...]]] = {
    "coscheduling": (Kind(POD_GROUP, "scheduling.x-k8s.io/v1alpha1", "podgroups"),),
    "podGroup": tuple(
        Kind(POD_GROUP, f"scheduling.k8s.io/{version}", "podgroups")
        for version in ("v1beta1", "v1alpha3", "v1alpha2")
    ),
}
"""PodGroups by the installation's kind of gang, the newest version first.

Kubernetes 1.35 has a Workload of another form and no PodGroup; 1.36 replaced it.
"""
KINDS: Final = {
    kind.kind: kind
    for kind in (
        RUN,
        POD,
        SERVICE,
        CONFIG_MAP,
        CLAIM,
        SECRET,
        EVENT,
        BUDGET,
        NETWORK_POLICY,
        LEASE,
        ACCESS_REVIEW,
        WEBHOOK,
        EARLY_WEBHOOK,
    )
}


def kind_of(body: Raw) -> Kind:
    """Return the kind of a whole object; two API groups have a PodGroup.

    Raises OperatorError if the operator does not create objects of this kind.
    """
    known = KINDS.get(body["kind"])
    if known is not None:
        return known
    version = body.get("apiVersion")
    for kind in (kind for kinds in POD_GROUPS.values() for kind in kinds):
        if (kind.kind, kind.version) == (body["kind"], version):
            return kind
    name = (body.get("metadata") or {}).get("name", "")
    raise OperatorError(
        f"{body['kind']} {name}: the operator makes no such object of API version {version or 'none'}. "
        "This is a defect of the operator; please report it."
    )
