"""The only module that talks to the API server: few verbs, dictionaries in and out, bounded, retried,
counted, fenced.

Through the official client's asyncio ApiClient. Where each kind lives is a table, so no request is spent on
discovery.
"""

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote, urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient

from evergrad_coordinator import contract
from evergrad_operator.errors import ApiError, LeaseLostError
from evergrad_operator.names import FIELD_MANAGER

Raw = Mapping[str, Any]
Query = dict[str, str]
Codes = list[str]
_SPREAD = 0.3
_JSON, _APPLY, _MERGE = (
    "application/json",
    "application/apply-patch+yaml",
    "application/merge-patch+json",
)
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""An answer that is small: most of what is stored is what was sent."""


@dataclass(frozen=True)
class Kind:
    """Where objects of one kind live."""

    kind: str
    version: str
    plural: str

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """The URL's path. Without a namespace: of the whole cluster."""
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


class Gate(Protocol):
    """Says whether this process may write now."""

    def remaining(self) -> float:
        """Seconds for which writing is allowed for sure; none or fewer: not at all."""


class OpenGate:
    """Writing is always allowed: there is only one operator."""

    def remaining(self) -> float:
        """No end."""
        return float("inf")


Observer = Callable[[str, str, str, float], None]
"""Told of every request: verb, resource, code (or "error"), seconds."""


@dataclass(frozen=True)
class Limits:
    """Of one client: requests under way, seconds for a request, tries, seconds between the first two."""

    in_flight: int = 32
    request_seconds: float = 15.0
    tries: int = 4
    first_pause: float = 0.2
    longest_pause: float = 5.0


_fence: ContextVar[Gate | None] = ContextVar("fence", default=None)


def check_gate(gate: Gate) -> float:
    """Seconds that may still be written. Raises LeaseLostError if there are none."""
    remaining = gate.remaining()
    if remaining <= 0:
        raise LeaseLostError
    return remaining


async def _check_fence(*_: Any) -> None:
    # The last moment before a request is sent, after waiting for a connection: a process that was stopped
    # goes no further.
    gate = _fence.get()
    if gate is not None:
        check_gate(gate)


def build_trace() -> aiohttp.TraceConfig:
    """What has to be among the client's ``trace_configs`` for writes to be fenced to the last moment."""
    trace = aiohttp.TraceConfig()
    trace.on_connection_create_end.append(_check_fence)
    trace.on_connection_reuseconn.append(_check_fence)
    return trace


class Kube:
    """Verbs on objects.

    All raise ApiError for what is refused or not answered; writes that are fenced off, LeaseLostError.
    """

    def __init__(
        self,
        client: ApiClient,
        *,
        gate: Gate | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
        on_unauthorized: Callable[[], None] | None = None,
    ) -> None:
        self._client, self._gate, self._limits = client, gate or OpenGate(), limits or Limits()
        self._observer = observer or (lambda verb, resource, code, seconds: None)
        self._on_unauthorized = on_unauthorized or (lambda: None)
        self._slots = asyncio.Semaphore(self._limits.in_flight)

    async def get(self, kind: Kind, namespace: str, name: str) -> Raw | None:
        """The object, or None if there is none."""
        try:
            return await self._request("GET", kind, kind.path(namespace, name), verb="get")
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_all(
        self,
        kind: Kind,
        namespace: str | None,
        *,
        selector: str = "",
        name: str = "",
        metadata_only: bool = False,
    ) -> tuple[list[Raw], int]:
        """All objects, or those of one name, and the version the list is as of.

        ``metadata_only``: as the API server's PartialObjectMetadata.
        """
        items: list[Raw] = []
        accept = (
            "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
            if metadata_only
            else _JSON
        )
        query: Query = {"limit": "500", **({"labelSelector": selector} if selector else {})}
        query |= {"fieldSelector": f"metadata.name={name}"} if name else {}
        while True:
            page = await self._request(
                "GET", kind, kind.path(namespace), verb="list", query=query, accept=accept
            )
            items += [{**item, "kind": kind.kind} for item in page.get("items") or ()]
            metadata = page.get("metadata") or {}
            if not metadata.get("continue"):
                return items, int(metadata.get("resourceVersion") or 0)
            query["continue"] = metadata["continue"]

    async def create(self, body: Raw, *, is_fenced: bool = True, is_brief: bool = False) -> Raw:
        """A new object, as it was stored; ``is_brief``: only its metadata.

        ApiError 409: one of that name exists.
        """
        kind, namespace = _locate(body)
        path, accept = kind.path(namespace), _METADATA if is_brief else _JSON
        query = {"fieldManager": FIELD_MANAGER}
        return await self._request(
            "POST",
            kind,
            path,
            verb="create",
            query=query,
            body=body,
            accept=accept,
            is_fenced=is_fenced,
        )

    async def apply(
        self,
        body: Raw,
        *,
        subresource: str = "",
        manager: str = FIELD_MANAGER,
        is_brief: bool = False,
    ) -> Raw:
        """The complete intent of ``manager`` by server-side apply, by force; the object as it was stored, or
        its metadata."""
        kind, namespace = _locate(body)
        path, accept = (
            kind.path(namespace, body["metadata"]["name"], subresource),
            _METADATA if is_brief else _JSON,
        )
        query = {"fieldManager": manager, "force": "true"}
        return await self._request(
            "PATCH",
            kind,
            path,
            verb="patch",
            query=query,
            body=body,
            content=_APPLY,
            accept=accept,
        )

    async def merge(self, kind: Kind, namespace: str, name: str, patch: Raw) -> Raw:
        """A JSON merge patch; metadata of the object as it was stored."""
        path, query = kind.path(namespace, name), {"fieldManager": FIELD_MANAGER}
        return await self._request(
            "PATCH",
            kind,
            path,
            verb="patch",
            query=query,
            body=patch,
            content=_MERGE,
            accept=_METADATA,
        )

    async def replace(self, body: Raw, *, is_fenced: bool = True) -> Raw:
        """The whole object, if its resourceVersion is still the newest. ApiError 409: it is not."""
        kind, namespace = _locate(body)
        path, query = (
            kind.path(namespace, body["metadata"]["name"]),
            {"fieldManager": FIELD_MANAGER},
        )
        return await self._request(
            "PUT", kind, path, verb="update", query=query, body=body, is_fenced=is_fenced
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str | None = None,
        grace: int | None = None,
    ) -> bool:
        """End one object, and no other of the same name; False if it was gone.

        ``grace``: seconds, None for the object's own.
        """
        options: dict[str, Any] = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": "Background",
        }
        options |= {"preconditions": {"uid": uid}} if uid else {}
        options |= {"gracePeriodSeconds": grace} if grace is not None else {}
        try:
            await self._request(
                "DELETE", kind, kind.path(namespace, name), verb="delete", body=options
            )
        except ApiError as error:
            if error.status == 404 or (error.status == 409 and uid is not None):
                return False
            raise
        return True

    async def may(
        self, verb: str, kind: Kind, *, namespace: str | None, subresource: str = ""
    ) -> bool:
        """Whether this process may do ``verb``, as the API server sees it."""
        group = kind.version.partition("/")[0] if "/" in kind.version else ""
        asked = {
            "verb": verb,
            "group": group,
            "resource": kind.plural,
            "subresource": subresource,
            "namespace": namespace or "",
        }
        body = {
            "kind": ACCESS_REVIEW.kind,
            "apiVersion": ACCESS_REVIEW.version,
            "spec": {"resourceAttributes": asked},
        }
        answer = await self._request(
            "POST",
            ACCESS_REVIEW,
            ACCESS_REVIEW.path(None),
            verb="create",
            body=body,
            is_fenced=False,
        )
        return bool((answer.get("status") or {}).get("allowed"))

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    # ---- one request ---------------------------------------------------------------------------------------

    async def _request(  # noqa: PLR0913
        self,
        method: str,
        kind: Kind,
        path: str,
        *,
        verb: str,
        query: Query | None = None,
        body: Raw | None = None,
        content: str = _JSON,
        accept: str = _JSON,
        is_fenced: bool = True,
    ) -> Raw:
        url = path + (f"?{urlencode(query)}" if query else "")
        headers = {"Accept": accept, "Content-Type": content, "User-Agent": FIELD_MANAGER}
        gate = self._gate if is_fenced and method != "GET" else None
        pauses = self._pauses()
        while True:
            try:
                return await self._try_once(
                    method, kind, url, verb=verb, headers=headers, body=body, gate=gate
                )
            except ApiError as error:
                pause = next(pauses, None) if error.is_transient else None
                if error.status == 401:
                    # The token may have been rotated: it is read again before the next try.
                    self._on_unauthorized()
                    pause = next(pauses, None)
                if pause is None:
                    raise
                wait = (
                    pause
                    if error.retry_after is None
                    else min(error.retry_after, 4 * self._limits.longest_pause)
                )
            await asyncio.sleep(wait)

    def _pauses(self) -> Iterator[float]:
        for number in range(self._limits.tries - 1):
            pause = min(self._limits.longest_pause, self._limits.first_pause * 3**number)
            yield pause * random.uniform(1 - _SPREAD, 1 + _SPREAD)

    async def _try_once(  # noqa: PLR0913
        self,
        method: str,
        kind: Kind,
        url: str,
        *,
        verb: str,
        headers: Mapping[str, str],
        body: Raw | None,
        gate: Gate | None,
    ) -> Raw:
        sent = dict(headers)
        await self._client.update_params_for_auth(
            sent, None, ["BearerToken"], url, method, body
        )
        async with self._slots, self._measure(verb, kind) as codes:
            seconds = min(
                self._limits.request_seconds, check_gate(gate) if gate else float("inf")
            )
            reset = _fence.set(gate)
            try:
                full, timeout = (
                    self._client.configuration.host + url,
                    aiohttp.ClientTimeout(total=seconds),
                )
                answer = await self._client.rest_client.request(
                    method, full, headers=sent, body=body, _request_timeout=timeout
                )
                codes.append(str(answer.status))
                data = await answer.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                # A write that was not answered in the lease's time may have been done: what follows observes
                # anew.
                raise ApiError(
                    0, "Unreachable", f"{method} {url}: {_describe(error)}"
                ) from error
            finally:
                _fence.reset(reset)
        if answer.status >= 300:
            raise _parse_refusal(answer.status, data, answer.headers.get("Retry-After"))
        try:
            parsed: Raw = json.loads(data)
        except ValueError as error:
            raise ApiError(0, "BadAnswer", f"{method} {url}: the answer is not JSON") from error
        return parsed

    @contextlib.asynccontextmanager
    async def _measure(self, verb: str, kind: Kind) -> AsyncIterator[Codes]:
        codes: Codes = []
        started = time.perf_counter()
        try:
            yield codes
        finally:
            self._observer(
                verb,
                kind.plural,
                codes[-1] if codes else "error",
                time.perf_counter() - started,
            )


def _locate(body: Raw) -> tuple[Kind, str]:
    return KINDS[body["kind"]], str(body["metadata"].get("namespace", ""))


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _parse_refusal(status: int, data: bytes, retry_after: str | None) -> ApiError:
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    details = parsed if isinstance(parsed, Mapping) else {}
    message = str(details.get("message") or data[:500].decode("utf-8", "replace"))
    reason = str(details.get("reason") or "")
    causes: Sequence[Raw] = (details.get("details") or {}).get("causes") or ()
    wait = (
        float(retry_after)
        if retry_after is not None and retry_after.strip().isdecimal()
        else None
    )
    return ApiError(
        status,
        reason,
        message,
        retry_after=wait,
        causes=tuple(str(cause.get("reason", "")) for cause in causes),
    )
