"""Sends requests to the API server: bounded, retried, counted, and fenced until they are sent.

Requests use the asyncio ApiClient of the official client.
"""

import asyncio
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client.api_client import ApiClient

from evergrad_operator.core.objects.backoff import find_delay
from evergrad_operator.core.objects.errors import ApiError, LeaseLostError
from evergrad_operator.core.objects.kinds import Kind, Raw
from evergrad_operator.core.objects.names import FIELD_MANAGER

JSON: Final = "application/json"
BAD_ANSWER: Final = "BadAnswer"
"""Reason of an answer that cannot be read."""
_SPREAD = 0.3
"""Share by which the pause before a retry varies, so that clients do not retry at the same moment."""


class Gate(Protocol):
    """Decides whether this process may write now."""

    def remaining(self) -> float:
        """Return the seconds for which writing is certainly allowed; 0 or less if it is not."""


class OpenGate:
    """A gate that always allows writes, for an installation with only one operator."""

    def remaining(self) -> float:
        """Return infinity."""
        return float("inf")


Observer = Callable[[str, str, str, float], None]
"""Called after every request with verb, resource, code (or "error") and seconds."""


@dataclass(frozen=True)
class RequestLimits:
    """Bounds of one client: concurrent requests, seconds per request, tries, and seconds between tries."""

    in_flight: int = 32
    request_seconds: float = 15.0
    tries: int = 4
    first_pause: float = 0.2
    longest_pause: float = 5.0


@dataclass(frozen=True)
class Request:
    """One request. ``path``: path without the query. ``verb``: verb of RBAC, for the metrics."""

    method: str
    kind: Kind
    path: str
    verb: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Raw | None = None
    content: str = JSON
    accept: str = JSON
    is_fenced: bool = True
    """Whether a write needs the lease."""

    @property
    def url(self) -> str:
        """Path and query."""
        if not self.query:
            return self.path
        return f"{self.path}?{urlencode(self.query)}"


_fence: ContextVar[Gate | None] = ContextVar("fence", default=None)


def check_gate(gate: Gate) -> float:
    """Return the seconds for which writing is still allowed. Raises LeaseLostError if there are none."""
    remaining = gate.remaining()
    if remaining <= 0:
        raise LeaseLostError
    return remaining


def build_trace() -> aiohttp.TraceConfig:
    """Build the trace for the client's ``trace_configs`` that checks the lease when a write is sent."""

    async def check_fence(*_: Any) -> None:
        # Check immediately before the request is sent. It may have waited for a connection until the lease
        # ended, or the process may have been suspended.
        gate = _fence.get()
        if gate is not None:
            check_gate(gate)

    trace = aiohttp.TraceConfig()
    # Check at both events. aiohttp writes the headers together with the body, which a separate task sends, so
    # other tasks may run in between.
    trace.on_request_headers_sent.append(check_fence)
    trace.on_request_chunk_sent.append(check_fence)
    return trace


class ApiTransport:
    """Sends requests. Raises ApiError if a request fails, LeaseLostError if a write lacks the lease."""

    def __init__(
        self,
        client: ApiClient,
        *,
        gate: Gate,
        limits: RequestLimits,
        observer: Observer,
        on_unauthorized: Callable[[], None],
    ) -> None:
        self._client = client
        self._gate = gate
        self._limits = limits
        self._observer = observer
        self._on_unauthorized = on_unauthorized
        self._slots = asyncio.Semaphore(limits.in_flight)

    async def send(self, request: Request) -> Raw:
        """Send a request, retry transient errors, and return the parsed answer."""
        limits = self._limits
        pauses = (
            find_delay(
                number, first=limits.first_pause, longest=limits.longest_pause, growth=3.0
            )
            for number in range(1, limits.tries)
        )
        while True:
            try:
                return await self._try_once(request)
            except ApiError as error:
                pause = next(pauses, None) if error.is_transient else None
                if error.status == 401:
                    # The token may have been rotated, so read it again before the next try.
                    self._on_unauthorized()
                    pause = next(pauses, None)
                if pause is None:
                    raise

                # Respect Retry-After, but bound it, because a pass over a run waits here.
                wait = pause * random.uniform(1 - _SPREAD, 1 + _SPREAD)
                if error.retry_after is not None:
                    wait = min(error.retry_after, 4 * limits.longest_pause)
            await asyncio.sleep(wait)

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _try_once(self, request: Request) -> Raw:
        method = request.method
        url = request.url
        gate = self._gate if request.is_fenced and method != "GET" else None
        headers = {
            "Accept": request.accept,
            "Content-Type": request.content,
            "User-Agent": FIELD_MANAGER,
        }
        await self._client.update_params_for_auth(
            headers, None, ["BearerToken"], url, method, request.body
        )

        # Check the gate after a slot is free, because the lease may end while the request waits for a slot.
        async with self._slots:
            started = time.perf_counter()
            code = "error"
            seconds = self._limits.request_seconds
            if gate is not None:
                seconds = min(seconds, check_gate(gate))
            reset = _fence.set(gate)
            try:
                answer = await self._client.rest_client.request(
                    method,
                    self._client.configuration.host + url,
                    headers=headers,
                    body=request.body,
                    _request_timeout=aiohttp.ClientTimeout(total=seconds),
                )
                code = str(answer.status)
                data = await answer.read()
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                # A write without an answer may have been carried out. The next pass observes the result.
                text = type(error).__name__
                if str(error):
                    text = f"{text}: {error}"
                raise ApiError(0, "Unreachable", f"{method} {url}: {text}") from error
            finally:
                _fence.reset(reset)
                seconds = time.perf_counter() - started
                self._observer(request.verb, request.kind.plural, code, seconds)

        if answer.status >= 300:
            raise _parse_refusal(answer.status, data, answer.headers.get("Retry-After"))
        try:
            parsed: Raw = json.loads(data)
        except ValueError as error:
            raise ApiError(
                0, BAD_ANSWER, f"{method} {url}: the answer is not JSON"
            ) from error
        return parsed


def _parse_refusal(status: int, data: bytes, retry_after: str | None) -> ApiError:
    try:
        parsed = json.loads(data)
    except ValueError:
        # A proxy in front of the API server may answer with other text than JSON.
        parsed = None
    answer = parsed if isinstance(parsed, Mapping) else {}
    message = answer.get("message") or data[:500].decode("utf-8", "replace")
    details = answer.get("details") or {}
    causes: Sequence[Raw] = details.get("causes") or ()

    # Retry-After may also be a date. Ignore it then, because our own pause is sufficient.
    seconds: float | None = None
    if retry_after is not None and retry_after.strip().isdecimal():
        seconds = float(retry_after)
    return ApiError(
        status,
        str(answer.get("reason") or ""),
        str(message),
        retry_after=seconds,
        causes=tuple(str(cause.get("reason", "")) for cause in causes),
    )
