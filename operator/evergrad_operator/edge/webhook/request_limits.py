"""Bounds the memory of connections and request bodies of the webhook's server.

Every pod may reach the port, and the server cannot distinguish the API server from other clients. But the API
server sends a whole request immediately. If a limit is reached, the connection or body that has been idle or
slow for the longest time is dropped. Therefore no number of slow clients can keep the API server out.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Final

import aiohttp
from aiohttp import web

log = logging.getLogger(__name__)
MAX_REQUEST_BYTES: Final = 13 * 2**18
"""Maximum size of a request. An object in etcd has at most 1.5 MiB, and a request contains it twice."""
MAX_CONNECTIONS: Final = 256
"""Maximum number of connections. Each takes 0.3 MiB with TLS. An API server opens one per running request."""
_BODY_ROOM: Final = 5 * MAX_REQUEST_BYTES
"""Maximum bytes of all bodies that are being read or checked: hundreds of usual ones, five of the largest."""
_READ_SECONDS: Final = 10.0
"""Maximum seconds to read a body. The API server sends it in milliseconds, and by default waits for 5 s."""
_HANDSHAKE_SECONDS: Final = 5.0
"""Maximum seconds of the TLS handshake."""
_BUSY_SECONDS: Final = 0.02
"""Seconds between two searches for an idle connection while the requests of all connections are checked."""
_PAUSE_SECONDS: Final = 1.0
"""Seconds to wait if a connection cannot be accepted, for example without free file descriptors."""


class Bodies:
    """The request bodies that are currently being read or checked."""

    def __init__(self) -> None:
        # Deadline and size of each body that is being read, the oldest first.
        self._reading: dict[asyncio.Timeout, int] = {}
        self._checked_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the body, and count its size until the block ends. Raises HTTPException.

        The connection accepts no further request, because pipelined requests would be kept in memory without
        being counted.
        """
        # Only the received bytes are counted, and a compressed body may have a thousand times as many.
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            what = f"Content-Encoding {encoding[:40]} is not read"
            remedy = "send the body without Content-Encoding"
            raise web.HTTPUnsupportedMediaType(text=f"{what}; {remedy}\n")
        size = request.content_length
        if size is None:
            size = MAX_REQUEST_BYTES  # the length of a chunked body is not known
        if size > MAX_REQUEST_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_REQUEST_BYTES, size)

        while self._reading and self._used_bytes + size > _BODY_ROOM:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            # A deadline that has just expired cannot be rescheduled.
            if not oldest.expired():
                oldest.reschedule(asyncio.get_running_loop().time())
        if self._used_bytes + size > _BODY_ROOM:
            raise web.HTTPServiceUnavailable(text="too many requests are being checked\n")

        try:
            async with asyncio.timeout(_READ_SECONDS) as deadline:
                self._reading[deadline] = size
                try:
                    body = await request.read()
                finally:
                    self._reading.pop(deadline, None)
        except TimeoutError:
            raise web.HTTPServiceUnavailable(text="the body came too slowly\n") from None
        except (OSError, aiohttp.ClientError, web.RequestPayloadError):
            # No client reads this answer, but any other error would be logged with its traceback each time.
            raise web.HTTPBadRequest(text="the body is not whole\n") from None

        request.protocol.close()
        self._checked_bytes += len(body)
        try:
            yield body
        finally:
            self._checked_bytes -= len(body)

    @property
    def _used_bytes(self) -> int:
        return self._checked_bytes + sum(self._reading.values())


async def end_after_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Close the connection after ``response``.

    Otherwise a client that does not read its answers could leave further requests in this process.
    """
    response.force_close()
    response.headers["Connection"] = "close"


class Connections:
    """The TLS connections of a listener, at most MAX_CONNECTIONS. asyncio's own server has no such limit."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        # Each connection with the task of its handshake, the least recently used first.
        self._open: dict[web.RequestHandler, asyncio.Task[None]] = {}
        self._busy: set[web.RequestHandler] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def start(self, server: web.Server, listener: socket.socket) -> None:
        """Accept connections of ``listener`` for ``server``. ``close`` also closes the listener."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(server, listener))

    @contextlib.contextmanager
    def busy(self, connection: web.RequestHandler) -> Iterator[None]:
        """Protect the connection from being closed in favour of another one until the block ends."""
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)
            if (task := self._open.pop(connection, None)) is not None:
                self._open[connection] = task

    async def close(self) -> None:
        """Accept no further connections. Open connections end with the server."""
        tasks = list(self._open.values())
        if self._accepting is not None:
            tasks.append(self._accepting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()

    async def _accept(self, server: web.Server, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            # Make room only after a client has connected, because idle connections may be used until then.
            try:
                client, _ = await loop.sock_accept(listener)
            except OSError as error:
                log.warning("the webhook accepts no connection now: %s", error)
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            with contextlib.ExitStack() as undo:
                undo.callback(client.close)
                await self._make_room()
                undo.pop_all()
            connection = server()
            self._open[connection] = asyncio.create_task(self._begin(connection, client))
            # Yield to the event loop. Otherwise all waiting clients would be accepted before any handshake.
            await asyncio.sleep(0)

    async def _make_room(self) -> None:
        """Wait until one more connection may be opened, and close an idle connection if needed."""
        while True:
            for one, beginning in list(self._open.items()):
                is_closed = one.transport is None or one.transport.is_closing()
                if is_closed and beginning.done():
                    del self._open[one]
            if len(self._open) < MAX_CONNECTIONS:
                return
            idle = next((one for one in self._open if one not in self._busy), None)
            if idle is None:
                await asyncio.sleep(_BUSY_SECONDS)
                continue
            # Abort instead of close, because a client that does not read would delay a close.
            self._open.pop(idle).cancel()
            if idle.transport is not None:
                idle.transport.abort()

    async def _begin(self, connection: web.RequestHandler, client: socket.socket) -> None:
        """Perform the TLS handshake. A failure is an error of the client and is ignored."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
