"""Checks for ``evergrad doctor`` whether the operator's webhook answers, and if not, why. Pure.

``doctor`` sends a run that only the webhook refuses, as a dry run. Nothing is created, and the answer depends
on the whole path from the API server to the operator.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.diagnosis.checks import Check, CheckState
from evergrad_common.contract import API_VERSION, KIND

WEBHOOK: Final = "trainingruns.evergrad.dev"
_NAME: Final = "webhook"
_NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""Label with the name of the namespace, which Kubernetes sets on every namespace."""
_UTC_TIME: Final = 0x17
_VERSION: Final = 0xA0
"""Tags of DER."""
# A percentage above 100 %. The API server's schema has no type for percentages, so only the webhook can
# refuse it.
_WRONG: Final = "spec.training.schedule.warmup"
QUESTION: Final[Mapping[str, Any]] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "evergrad-doctor"},
    "spec": {
        "training": {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "sources": [{"name": "none", "path": "none.jsonl"}],
                "sequenceLength": 8,
            },
            "batching": {"globalBatchSize": 1, "microBatchSize": 1},
            "optimizer": {"learningRate": 0.001},
            "schedule": {"warmup": "150%"},
            "horizon": {"steps": 1},
        }
    },
}
"""A run with one mistake, which the API server's own rules cannot detect."""


class WebhookAnswer(StrEnum):
    """Kinds of answers of the API server to the dry run."""

    REFUSED = "the webhook refused it"
    ACCEPTED = "nothing refused it"
    FAILED = "the webhook was asked and did not answer"
    UNKNOWN = "something else refused it"


@dataclass(frozen=True)
class Asked:
    """The answer to the dry run, with the API server's message if it sent one."""

    answer: WebhookAnswer
    message: str = ""
    namespace: str = ""
    """Namespace of the dry run. If it is empty, the namespace is unknown and every webhook counts as covering
    it."""


def judge_refusal(paths: Sequence[str], message: str) -> Asked:
    """Return the answer that a refusal of the API server means, by the fields that the refusal names."""
    # A rule of the API server, which runs before the webhook, has refused any other field.
    if _WRONG in paths:
        return Asked(WebhookAnswer.REFUSED)
    return Asked(WebhookAnswer.UNKNOWN, message)


def judge_failure(message: str) -> Asked:
    """Return the answer that a failure of the API server means. The API server fails if a required webhook
    does not answer."""
    # The API server reports InternalError with one cause, which has neither a reason nor a field. Only its
    # text contains the name of the webhook.
    return Asked(
        WebhookAnswer.FAILED if WEBHOOK in message else WebhookAnswer.UNKNOWN, message
    )


def check_webhook(
    asked: Asked,
    configurations: Sequence[Mapping[str, Any]] | None,
    slices: Sequence[Mapping[str, Any]] | None,
    secret: Mapping[str, Any] | None,
    *,
    now: float,
) -> Check:
    """Check the webhook as a whole.

    ``configurations``: all ValidatingWebhookConfigurations. ``slices``: EndpointSlices of its service.
    ``secret``: the Secret with its certificate. Each is None if this user may not read it. ``now``: Unix
    seconds.
    """
    if asked.answer is WebhookAnswer.REFUSED:
        return Check(
            _NAME, CheckState.OK, "kubectl apply reports what evergrad validate reports"
        )
    if asked.answer is WebhookAnswer.UNKNOWN:
        return Check(_NAME, CheckState.SKIP, f"it could not be asked; {asked.message}")
    webhook = find_webhook(configurations or (), asked.namespace)
    if configurations is not None and webhook is None:
        # An operator that serves only some namespaces has a webhook for these namespaces.
        if find_webhook(configurations) is None:
            what, remedy = (
                "none is configured",
                "Switch it on in the chart: --set webhook.enabled=true",
            )
        else:
            what = f"no webhook covers this namespace, {asked.namespace}"
            remedy = (
                "Add the namespace to rbac.watchNamespaces of the operator that serves it"
            )
        what += "; a wrong file is accepted, and its run then becomes InvalidSpec"
        return Check(_NAME, CheckState.WARN, what, remedy)

    # With failurePolicy Ignore, the API server skips a webhook that does not answer. With Fail, no run can be
    # created.
    state = CheckState.FAIL if asked.answer is WebhookAnswer.FAILED else CheckState.WARN
    what = (
        "it does not answer, and no run can be created"
        if state is CheckState.FAIL
        else "it is not asked or does not answer; a wrong file is accepted, and its run becomes InvalidSpec"
    )
    why, remedy = _find_fault(webhook, slices, secret, now)
    reasons = [part for part in (why, asked.message) if part]
    return Check(_NAME, state, "; ".join([what, *reasons]), remedy)


def find_webhook(
    configurations: Sequence[Mapping[str, Any]], namespace: str = ""
) -> Mapping[str, Any] | None:
    """Return our webhook in the configurations: the first that covers ``namespace``, or the first of all if
    ``namespace`` is empty."""
    entries: list[Mapping[str, Any]] = [
        entry for raw in configurations for entry in raw.get("webhooks") or ()
    ]
    for entry in entries:
        # The chart selects namespaces by their names. A selection by other labels cannot be evaluated here,
        # so it counts as covering: a wrong warning would be worse than a missing one.
        selector = (entry.get("namespaceSelector") or {}).get("matchExpressions") or ()
        is_covering = all(
            namespace in (one.get("values") or ())
            for one in selector
            if (one.get("key"), one.get("operator")) == (_NAMESPACE_LABEL, "In")
        )
        if entry.get("name") == WEBHOOK and (not namespace or is_covering):
            return entry
    return None


def service_of(webhook: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return namespace and name of the service that the API server calls (may be empty)."""
    service = part(webhook, "clientConfig", "service")
    return str(service.get("namespace", "")), str(service.get("name", ""))


def _find_fault(
    webhook: Mapping[str, Any] | None,
    slices: Sequence[Mapping[str, Any]] | None,
    secret: Mapping[str, Any] | None,
    now: float,
) -> tuple[str, str]:
    """Return why the webhook does not answer, and the remedy, for the first fault between API server and
    operator."""
    namespace, name = service_of(webhook)
    log = f"Look at the operator's log: kubectl -n {namespace or 'NAMESPACE'} get pods"
    if webhook is None:
        return "this user may not read its configuration", log

    # First check the CA that the API server trusts: without it, no connection is possible.
    trusted = _decode(part(webhook, "clientConfig").get("caBundle"))
    if not trusted:
        return (
            "its configuration has no caBundle, which the operator or cert-manager adds",
            log,
        )
    if (fault := _fault_of_time(trusted, now)) is not None:
        renew = "The operator renews it while it runs (cert-manager: kubectl describe certificate)"
        return f"the certificate in its caBundle {fault}", f"{renew}. {log}"

    # Then check for a pod that accepts the request.
    endpoints = [one for raw in slices or () for one in raw.get("endpoints") or ()]
    are_ready = [part(one, "conditions").get("ready") is not False for one in endpoints]
    if slices is not None and not any(are_ready):
        return f"the service {namespace}/{name} has no endpoint that is ready", log

    # Then check the certificate that the pod serves: it may be newer or older than the caBundle.
    data = (secret or {}).get("data") or {}
    served, issuer = _decode(data.get("tls.crt")), _decode(data.get("ca.crt"))
    if served and (fault := _fault_of_time(served, now)) is not None:
        return f"its certificate {fault}", log
    if issuer and not set(_split(issuer)) & set(_split(trusted)):
        why = "its certificate was issued by another authority than the one in the caBundle"
        return (
            why,
            f"Delete the Secret {namespace}/{name}-webhook; the operator makes another",
        )
    # Only the network is left, which this command cannot check.
    remedy = "Let the API server reach the operator's port 9443: NetworkPolicies, firewalls"
    return "configuration, endpoint and certificate look right", remedy


# ---- certificates ------------------------------------------------------------------------------------------


def _decode(text: Any) -> str:
    """Return the PEM text of a base64 value; empty if the value is not valid."""
    try:
        return base64.b64decode(text or "", validate=True).decode("ascii")
    except (ValueError, TypeError, binascii.Error):
        return ""


def _split(pem: str) -> list[str]:
    """Return the certificates of a PEM text, each as its joined base64 lines."""
    parts = pem.split("-----BEGIN CERTIFICATE-----")[1:]
    return ["".join(part.partition("-----END")[0].split()) for part in parts]


def _fault_of_time(pem: str, now: float) -> str | None:
    """Return the problem with the validity of the first certificate of ``pem``, or None."""
    try:
        start, end = read_validity(base64.b64decode(_split(pem)[0]))
    except (IndexError, ValueError):
        return "cannot be read"
    if now < start:
        return "is not valid yet; this machine's clock or the operator's is wrong"
    return "has expired" if now > end else None


def read_validity(der: bytes) -> tuple[float, float]:
    """Return begin and end of a certificate's validity in Unix seconds, by RFC 5280 section 4.1.

    The standard library reads only CA certificates, and a dependency for one check is not worth it. Raises
    ValueError if ``der`` is not a certificate.
    """
    # Certificate and TBSCertificate are sequences: the content of each begins with its first element.
    _, certificate, _ = _element(der, 0)
    _, position, _ = _element(der, certificate)
    # version (tag 0) is optional; then come serialNumber, signature and issuer before the validity.
    tag, _, _ = _element(der, position)
    for _ in range(4 if tag == _VERSION else 3):
        _, _, position = _element(der, position)
    _, inside, _ = _element(der, position)
    times = []
    for _ in range(2):
        tag, start, after = _element(der, inside)
        text = der[start:after].decode("ascii")
        # UTCTime has a year of two digits, beginning with 1950; GeneralizedTime has four digits.
        if tag == _UTC_TIME:
            text = f"{19 if int(text[:2]) >= 50 else 20}{text}"
        times.append(datetime.strptime(f"{text[:-1]}+0000", "%Y%m%d%H%M%S%z").timestamp())
        inside = after
    return times[0], times[1]


def _element(der: bytes, position: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at ``position``, the start of its content, and its end."""
    if position + 2 > len(der):
        raise ValueError("the certificate ends early")
    tag, length, start = der[position], der[position + 1], position + 2
    # Long form: the low bits of the first byte are the number of bytes of the length.
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    if start + length > len(der):
        raise ValueError("the certificate ends early")
    return tag, start, start + length
