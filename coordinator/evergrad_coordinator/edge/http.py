"""A minimal HTTP/1.1 server: the run's page, /live, /status, /healthz, /readyz, /metrics, POST of /bounds.

Requests, connections and times are bounded. /healthz, /metrics and the page itself, which contains no data of
the run, are open to all clients. All other paths need the run's token. If the server listens on a loopback
address, a browser of this machine may read the events of /live without the token.
"""

import asyncio
import contextlib
import ipaddress
import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from evergrad_common.addresses import open_listener
from evergrad_common.contract import INSTANCE_HEADER
from evergrad_common.secret import is_token
from evergrad_coordinator.edge.live_feed import MOST_PAGES, LiveFeed
from evergrad_coordinator.edge.page_files import build_page, is_own_request
from evergrad_coordinator.edge.server import Server
from evergrad_coordinator.rules.status import EdgeFacts, build_metrics, build_status

MAX_REQUEST_BYTES = 8192
MAX_CONNECTIONS = 64
REQUEST_SECONDS = 5.0
_BOUNDS = "/bounds"
_TEXT = "text/plain; charset=utf-8"
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
_JSON = "application/json"
_HTML = "text/html; charset=utf-8"
_EVENTS = "text/event-stream"
_PAGE = "/"
_LIVE = "/live"
_OPEN = ("/healthz", "/metrics", _PAGE)
_PAGES = (_PAGE, "/status", "/healthz", "/readyz", "/metrics")
_REASONS = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True)
class HttpResponse:
    """An HTTP answer. ``headers``: headers in addition to the headers of every answer."""

    status: int
    kind: str
    body: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    is_live: bool = False
    """Whether the connection stays open after the headers and receives events."""

    def encode(self, *, has_body: bool) -> bytes:
        """Return the answer as bytes. If ``is_live``, these are only the headers."""
        data = self.body.encode()
        # Each connection has one request and closes after the answer, so no state of a client is kept.
        headers = {
            "Content-Type": self.kind,
            **({} if self.is_live else {"Content-Length": str(len(data))}),
            **self.headers,
            "Cache-Control": "no-store",
            "Connection": "close",
        }
        lines = [f"HTTP/1.1 {self.status} {_REASONS[self.status]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + (data if has_body else b"")


def _find_header(head: bytes, wanted: str) -> str:
    """Return the value of a header, or "" if it is missing. ``wanted``: name in lower case."""
    for line in head.decode("latin-1").split("\r\n")[1:]:
        name, _, value = line.partition(":")
        if name.strip().lower() == wanted:
            return value.strip()
    return ""


class StatusServer:
    """Serves one request per connection."""

    def __init__(self, server: Server, feed: LiveFeed | None = None) -> None:
        self._server = server
        self._feed = feed or LiveFeed()
        # Use a random value, not the run's name or token, because /healthz sends it to all clients.
        self.instance = secrets.token_hex(8)
        """Random name of this process. It distinguishes the process from a later one on the same port."""
        self._is_local = False
        self._listener: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, None] = {}
        """Open connections, in the order of their arrival."""

    async def listen(self, host: str, port: int) -> int:
        """Start to serve, and return the port. Raises OSError if the address cannot be bound."""
        self._listener = await asyncio.start_server(
            self._serve, sock=open_listener(host, port), limit=MAX_REQUEST_BYTES
        )
        # If ``host`` is a DNS name and not an address, it does not count as local, so the token is required.
        with contextlib.suppress(ValueError):
            self._is_local = ipaddress.ip_address(host).is_loopback
        self._feed.start(self._server.group)
        return int(self._listener.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening, and close the open pages."""
        if self._listener:
            self._listener.close()
        self._feed.close()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._open[writer] = None
        if len(self._open) > MAX_CONNECTIONS:
            # Requests are answered immediately, so the oldest connection sends no request or does not read.
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                length = _find_header(head, "content-length") or "0"
                # Refuse a long body before it is read, because it would fill the memory. Check the number of
                # digits first, because ``int`` raises ValueError for thousands of digits.
                is_short = len(length) <= len(str(MAX_REQUEST_BYTES)) and length.isdecimal()
                if not is_short or int(length) > MAX_REQUEST_BYTES:
                    raise OSError("no such body is taken")
                body = await reader.readexactly(int(length))
                answer = self._answer(head, body)
                writer.write(answer.encode(has_body=not head.startswith(b"HEAD ")))
                if not answer.is_live:
                    await writer.drain()
            if answer.is_live:
                # A live connection stays open and must not count towards MAX_CONNECTIONS.
                self._open.pop(writer, None)
                self._feed.open(writer)
                # The page sends nothing more; read only to detect the end of the connection.
                while await reader.read(MAX_REQUEST_BYTES):
                    pass
        except (
            TimeoutError,
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
        ):
            writer.transport.abort()
        finally:
            self._feed.close_page(writer)
            self._open.pop(writer, None)
            with contextlib.suppress(OSError):
                writer.close()

    def _answer(self, head: bytes, content: bytes) -> HttpResponse:
        """Return the answer to a request. Without the token, it is refused before any lookup."""
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        path = words[1].partition("?")[0] if len(words) == 3 else ""
        # Check the token first: without it, the answer must not reveal whether a path exists.
        scheme, _, said = _find_header(head, "authorization").partition(" ")
        token = self._server.group.settings.token
        is_ours = scheme.lower() == "bearer" and is_token(said.strip(), token)
        site = _find_header(head, "sec-fetch-site")
        is_own = self._is_local and is_own_request(_find_header(head, "host"), site)
        is_open = path in _OPEN or (path == _LIVE and is_own)
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return HttpResponse(400, _TEXT, "not an HTTP/1.1 request\n")
        if not is_open and not is_ours:
            text = "the run's token is needed: Authorization: Bearer TOKEN\n"
            return HttpResponse(401, _TEXT, text, {"WWW-Authenticate": "Bearer"})
        if path == _BOUNDS and words[0] == "POST":
            return self._set_bounds(content)
        if words[0] not in ("GET", "HEAD") or path == _BOUNDS:
            text = f"only GET and HEAD, and POST of {_BOUNDS}\n"
            allowed = "POST" if path == _BOUNDS else "GET, HEAD"
            return HttpResponse(405, _TEXT, text, {"Allow": allowed})
        return self._page(path, is_read=words[0] == "GET")

    def _set_bounds(self, content: bytes) -> HttpResponse:
        """Set the bounds of a JSON object such as ``{"min": 2, "max": 4}``.

        ``min`` and ``max`` are numbers of nodes. The optional ``"maxFailures": 3`` sets the number of allowed
        failures. Returns 400 with the problem if the bounds are invalid.
        """
        try:
            bounds = json.loads(content)
            low, high, failures = bounds["min"], bounds["max"], bounds.get("maxFailures", 0)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return HttpResponse(
                400, _TEXT, 'bounds: not a JSON object such as {"min": 2, "max": 4}\n'
            )
        # Compare the type, because ``isinstance(True, int)`` is true.
        if type(low) is not int or type(high) is not int:
            return HttpResponse(400, _TEXT, "bounds: min and max are whole numbers\n")
        if type(failures) is not int:
            return HttpResponse(
                400, _TEXT, "bounds: maxFailures is a whole number, at least 0\n"
            )
        fault = self._server.set_bounds(
            low, high, failures if "maxFailures" in bounds else None
        )
        return (
            HttpResponse(400, _TEXT, f"{fault}\n")
            if fault
            else HttpResponse(200, _TEXT, "ok\n")
        )

    def _page(self, path: str, *, is_read: bool) -> HttpResponse:
        """Build the answer for a path. There is no cache; MAX_CONNECTIONS bounds the cost."""
        server, counters = self._server, self._server.counters
        if path == "/healthz":
            stall, headers = server.find_stall(), {INSTANCE_HEADER: self.instance}
            return HttpResponse(503 if stall else 200, _TEXT, f"{stall or 'ok'}\n", headers)
        if path == "/readyz":
            obstacle = server.find_obstacle()
            return HttpResponse(503 if obstacle else 200, _TEXT, f"{obstacle or 'ok'}\n")
        if path == "/status":
            status = build_status(server.group, now=time.monotonic())
            return HttpResponse(200, _JSON, json.dumps(status, allow_nan=False) + "\n")
        if path == _PAGE:
            page = build_page("run", needs_token=not self._is_local)
            return HttpResponse(200, _HTML, page.text, page.headers)
        if path == _LIVE and is_read:
            if self._feed.is_full:
                return HttpResponse(503, _TEXT, f"{MOST_PAGES} pages are open; close one\n")
            return HttpResponse(200, _EVENTS, is_live=True)
        if path != "/metrics":
            return HttpResponse(404, _TEXT, f"there are {', '.join((*_PAGES, _BOUNDS))}\n")
        # The server itself counts connections, refusals and journal failures, which the rules do not know.
        edge = EdgeFacts(
            connections=server.num_connections,
            connections_total=counters.connections,
            messages_total=counters.messages,
            internal_errors_total=counters.internal_errors,
            journal_failures_total=server.effects.num_failures,
            journal_writable=int(server.effects.is_writable),
            rejected_total=counters.rejected,
        )
        return HttpResponse(
            200, _METRICS, build_metrics(server.group, edge, now=time.monotonic())
        )
