"""Connections and bodies of the webhook's server, within bounds of memory.

Every pod may reach the port, and the API server cannot be told from another client. It sends a whole request
at once, however. Where room is short, whoever has been idle or slow for longest therefore makes room for the
newest, so that no number of such clients keeps the API server out.
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
"""etcd takes 1.5 MiB of an object, and a request holds it twice, as JSON, with a little around it."""
MAX_CONNECTIONS: Final = 256
"""Connections at a time; one with TLS takes 0.3 MiB. An API server opens one for each request under way."""
_BODY_ROOM: Final = 5 * MAX_REQUEST_BYTES
"""Bytes of all bodies that are read or checked at a time: hundreds of usual ones, five of the largest."""
_READ_SECONDS: Final = 10.0
"""Longest time to read a body. The API server sends it in milliseconds, and by default waits for 5 s."""
_HANDSHAKE_SECONDS: Final = 5.0
"""Longest time for the beginning of TLS."""
_BUSY_SECONDS: Final = 0.02
"""Time between two looks for a connection to close, while each has a request that is being checked."""
_PAUSE_SECONDS: Final = 1.0
"""Pause after a connection that the system could not give, as without further file descriptors."""


class Bodies:
    """Bodies that are read or checked at the moment."""

    def __init__(self) -> None:
        # Deadline and size of each body that is being read, the oldest first.
        self._reading: dict[asyncio.Timeout, int] = {}
        self._checked_bytes = 0

    @contextlib.asynccontextmanager
    async def read(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the body, which takes its room until the block ends. Raises HTTPException.

        The connection takes no further request: requests that are sent before an answer would be held, and
        counted nowhere.
        """
        # The room is that of the bytes that are sent: inflated, a body takes a thousand times as many.
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            what = f"Content-Encoding {encoding[:40]} is not read"
            remedy = "send the body without Content-Encoding"
            raise web.HTTPUnsupportedMediaType(text=f"{what}; {remedy}\n")
        size = request.content_length
        if size is None:
            size = MAX_REQUEST_BYTES  # a body in chunks does not say how long it will be
        if size > MAX_REQUEST_BYTES:
            raise web.HTTPRequestEntityTooLarge(MAX_REQUEST_BYTES, size)

        while self._reading and self._used_bytes + size > _BODY_ROOM:
            oldest = next(iter(self._reading))
            del self._reading[oldest]
            # A deadline that is just over cannot be moved, and need not be.
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
            # Nobody reads this answer; an error would be logged with its traceback each time.
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
    """Make ``response``, as it is being sent, the last one of its connection.

    A client that does not read its answers would otherwise leave further requests to this process.
    """
    response.force_close()
    response.headers["Connection"] = "close"


class Connections:
    """TLS connections of a listener. asyncio's own server has no bound of them."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        # Each connection with the task of its handshake; the one that was used longest ago first.
        self._open: dict[web.RequestHandler, asyncio.Task[None]] = {}
        self._busy: set[web.RequestHandler] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None

    def start(self, server: web.Server, listener: socket.socket) -> None:
        """Accept connections of ``listener``, which ``close`` closes, for ``server``."""
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(server, listener))

    @contextlib.contextmanager
    def busy(self, connection: web.RequestHandler) -> Iterator[None]:
        """Close the connection for no other while the block, which checks its request, lasts."""
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)
            if (task := self._open.pop(connection, None)) is not None:
                self._open[connection] = task

    async def close(self) -> None:
        """Accept no further connections. Those that are served end with the server."""
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
            # Room is made once somebody is there: a connection that is idle is of use until then.
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
            # Without a pause a row of waiting clients would be accepted before any of them begins.
            await asyncio.sleep(0)

    async def _make_room(self) -> None:
        """Return as soon as one more connection may be open."""
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
            # Not closed in peace: a client that does not read would hold that up.
            self._open.pop(idle).cancel()
            if idle.transport is not None:
                idle.transport.abort()

    async def _begin(self, connection: web.RequestHandler, client: socket.socket) -> None:
        """Begin TLS. A client that fails to is no error of ours."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            await loop.connect_accepted_socket(
                lambda: connection,
                client,
                ssl=self._context,
                ssl_handshake_timeout=_HANDSHAKE_SECONDS,
            )
