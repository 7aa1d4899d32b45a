"""The paths of objects of each kind on the API server, as a table, so that discovery costs no request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from evergrad_coordinator import contract

Raw = Mapping[str, Any]
"""An object as the API server sends it."""


@dataclass(frozen=True)
class Kind:
    """One kind of object, with its API version and its plural in paths."""

    kind: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """Return the URL's path, of the whole cluster where no namespace is given."""
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
