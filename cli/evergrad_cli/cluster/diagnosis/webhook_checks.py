"""Checks the operator's webhook for ``evergrad doctor``: whether it answers, and if not, why. Pure.

``doctor`` sends a run that only the webhook refuses, as a dry run: nothing is created, and the answer depends
on the whole way from the API server to the operator.
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
"""Label of every namespace: its own name."""
_UTC_TIME: Final = 0x17
_VERSION: Final = 0xA0
"""Tags of DER."""
# A share above 100 %: the API server's schema has no type for shares, so that only the webhook can refuse it.
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
"""A run with one mistake, which the API server's own rules cannot find."""


class WebhookAnswer(StrEnum):
    """Kinds of answers of the API server to the question."""

    REFUSED = "the webhook refused it"
    ACCEPTED = "nobody refused it"
    FAILED = "the webhook was asked and did not answer"
    UNKNOWN = "something else refused it"


@dataclass(frozen=True)
class Asked:
    """The answer, with the API server's own words where it gave any."""

    answer: WebhookAnswer
    message: str = ""
    namespace: str = ""
    """Namespace of the run that was sent; empty: unknown, and every webhook counts as covering it."""


def judge_refusal(paths: Sequence[str], message: str) -> Asked:
    """The answer in a refusal of the API server, by the fields that it names."""
    # Any other field is refused by a rule of the API server, which comes before the webhook.
    if _WRONG in paths:
        return Asked(WebhookAnswer.REFUSED)
    return Asked(WebhookAnswer.UNKNOWN, message)


def judge_failure(message: str) -> Asked:
    """The answer in a failure of the API server: a webhook that may not be passed over and does not answer is
    one."""
    # The API server calls it InternalError, with one cause that has neither a reason nor a field: the name of
    # the webhook stands in its text alone.
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
    """The webhook as a whole.

    ``configurations``: all ValidatingWebhookConfigurations. ``slices``: EndpointSlices of its service.
    ``secret``: the one with its certificate. Each is None where this user may not read it. ``now``: seconds
    since 1970.
    """
    if asked.answer is WebhookAnswer.REFUSED:
        return Check(
            _NAME, CheckState.OK, "kubectl apply reports what evergrad validate reports"
        )
    if asked.answer is WebhookAnswer.UNKNOWN:
        return Check(_NAME, CheckState.SKIP, f"it could not be asked; {asked.message}")
    webhook = find_webhook(configurations or (), asked.namespace)
    if configurations is not None and webhook is None:
        # An operator that serves some namespaces has a webhook for these alone.
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

    # With failurePolicy Ignore a webhook that is silent is passed over; with Fail it keeps every run from
    # being created.
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
    """Our webhook's entry, among all configurations: the first one that is asked about ``namespace``; without
    a namespace the first of all."""
    entries: list[Mapping[str, Any]] = [
        entry for raw in configurations for entry in raw.get("webhooks") or ()
    ]
    for entry in entries:
        # The chart selects namespaces by their names. A selection by other labels cannot be decided here, and
        # counts as covering: a warning that is wrong would be worse than none.
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
    """Namespace and name of the service that the API server asks; empty where none is named."""
    service = part(webhook, "clientConfig", "service")
    return str(service.get("namespace", "")), str(service.get("name", ""))


def _find_fault(
    webhook: Mapping[str, Any] | None,
    slices: Sequence[Mapping[str, Any]] | None,
    secret: Mapping[str, Any] | None,
    now: float,
) -> tuple[str, str]:
    """Why the webhook does not answer, and the remedy: the first fault on the way to the operator."""
    namespace, name = service_of(webhook)
    log = f"Look at the operator's log: kubectl -n {namespace or 'NAMESPACE'} get pods"
    if webhook is None:
        return "this user may not read its configuration", log

    # First the authority that the API server trusts: without it no connection is made at all.
    trusted = _decode(part(webhook, "clientConfig").get("caBundle"))
    if not trusted:
        return (
            "its configuration has no caBundle, which the operator or cert-manager adds",
            log,
        )
    if (fault := _fault_of_time(trusted, now)) is not None:
        renew = "The operator renews it while it runs (cert-manager: kubectl describe certificate)"
        return f"the certificate in its caBundle {fault}", f"{renew}. {log}"

    # Then a pod that takes the request.
    endpoints = [one for raw in slices or () for one in raw.get("endpoints") or ()]
    are_ready = [part(one, "conditions").get("ready") is not False for one in endpoints]
    if slices is not None and not any(are_ready):
        return f"the service {namespace}/{name} has no endpoint that is ready", log

    # Then the certificate that the pod serves: it may be newer or older than the caBundle.
    data = (secret or {}).get("data") or {}
    served, issuer = _decode(data.get("tls.crt")), _decode(data.get("ca.crt"))
    if served and (fault := _fault_of_time(served, now)) is not None:
        return f"its certificate {fault}", log
    if issuer and not set(_split(issuer)) & set(_split(trusted)):
        why = "its certificate is of another authority than the caBundle names"
        return (
            why,
            f"Delete the Secret {namespace}/{name}-webhook; the operator makes another",
        )
    # Only the network is left, which cannot be looked at from here.
    remedy = "Let the API server reach the operator's port 9443: NetworkPolicies, firewalls"
    return "configuration, endpoint and certificate look right", remedy


# ---- certificates ------------------------------------------------------------------------------------------


def _decode(text: Any) -> str:
    """The PEM text of a base64 value; empty for what is none."""
    try:
        return base64.b64decode(text or "", validate=True).decode("ascii")
    except (ValueError, TypeError, binascii.Error):
        return ""


def _split(pem: str) -> list[str]:
    """The certificates of a PEM text, each as its base64 lines joined."""
    parts = pem.split("-----BEGIN CERTIFICATE-----")[1:]
    return ["".join(part.partition("-----END")[0].split()) for part in parts]


def _fault_of_time(pem: str, now: float) -> str | None:
    """Return what is wrong with the validity of the first certificate of ``pem``."""
    try:
        start, end = read_validity(base64.b64decode(_split(pem)[0]))
    except (IndexError, ValueError):
        return "cannot be read"
    if now < start:
        return "is not valid yet; this machine's clock or the operator's is wrong"
    return "has expired" if now > end else None


def read_validity(der: bytes) -> tuple[float, float]:
    """Begin and end of a certificate's validity, seconds since 1970, by RFC 5280 section 4.1.

    The standard library reads only certificates of authorities, and this package needs no other. Raises
    ValueError for what is no certificate.
    """
    # Certificate and TBSCertificate are sequences: the content of each begins with its first element.
    _, certificate, _ = _element(der, 0)
    _, position, _ = _element(der, certificate)
    # version (tagged 0) may be left out; then serialNumber, signature and issuer precede the validity.
    tag, _, _ = _element(der, position)
    for _ in range(4 if tag == _VERSION else 3):
        _, _, position = _element(der, position)
    _, inside, _ = _element(der, position)
    times = []
    for _ in range(2):
        tag, start, after = _element(der, inside)
        text = der[start:after].decode("ascii")
        # UTCTime has two digits of the year, from 1950 on; GeneralizedTime has four.
        if tag == _UTC_TIME:
            text = f"{19 if int(text[:2]) >= 50 else 20}{text}"
        times.append(datetime.strptime(f"{text[:-1]}+0000", "%Y%m%d%H%M%S%z").timestamp())
        inside = after
    return times[0], times[1]


def _element(der: bytes, position: int) -> tuple[int, int, int]:
    """Tag of the DER element at ``position``, where its content begins, and where it ends."""
    if position + 2 > len(der):
        raise ValueError("the certificate ends early")
    tag, length, start = der[position], der[position + 1], position + 2
    # The long form: the low bits of the first byte count the bytes of the length.
    if length & 0x80:
        size = length & 0x7F
        length, start = int.from_bytes(der[start : start + size]), start + size
    if start + length > len(der):
        raise ValueError("the certificate ends early")
    return tag, start, start + length
