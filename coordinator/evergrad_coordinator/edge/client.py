"""The node's side of the protocol: one connection to the coordinator, which reconnects automatically."""

import asyncio
import contextlib
import logging
import random
import socket
import time
from collections import deque
from collections.abc import Callable

from evergrad_common.codec import (
    MAX_LINE_BYTES,
    ProtocolError,
    UnknownTypeError,
    encode,
)
from evergrad_coordinator.protocol import (
    Commit,
    End,
    Hello,
    Message,
    Permit,
    Ping,
    Pong,
    Refused,
    Welcome,
    decode_from_coordinator,
)

_log = logging.getLogger(__name__)
PING_SECONDS = 0.5
SILENCE_SECONDS = 5.0
"""Seconds without a message after which the connection is replaced.

It is longer than the pauses of a coordinator on a busy machine, and short enough to reach the next
coordinator within a lease.
"""
CONNECT_SECONDS = 3.0
COMMIT_SECONDS = 2.0
"""Maximum seconds that a save waits for a permission. Without an answer, it is not published."""
UNSENT_BYTES = 1024 * 1024
"""Maximum number of unsent bytes. If the coordinator reads more slowly, the connection is replaced."""


class _OwnerFailed(Exception):  # noqa: N818 - no error of this package
    """Wraps the ``error`` of an owner's callback, so that it is not handled as an error of the connection."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CoordinatorClient:
    """A node's connection to the coordinator. It reconnects until it is closed or the run ends.

    Call all methods in the thread of the event loop that awaits ``run``.

    ``hello`` is called for each connection and returns the current description of the node. ``on_message``
    receives every message of the coordinator except the answers to ``commit`` and ``ping``. ``on_connected``
    is called after each welcome, so that the owner can send its state again.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        hello: Callable[[], Hello],
        on_message: Callable[[Message], None],
        on_connected: Callable[[], None] = lambda: None,
    ) -> None:
        self._host, self._port = host, port
        self._hello, self._on_message, self._on_connected = hello, on_message, on_connected
        self._writer: asyncio.StreamWriter | None = None
        self._is_welcome = False
        self._is_over = False
        self._has_met_unknown = False
        """Whether a warning about unknown messages of a newer coordinator was logged."""
        self._contact_at: float | None = None
        self._pings: deque[float] = deque()
        """Send times of the unanswered pings. Answers arrive in the same order."""
        self._session_heard_at = 0.0
        self._commits: dict[int, asyncio.Future[bool]] = {}
        self._num_commits = 0
        self._wake = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether the connection is open and the coordinator has sent its welcome."""
        return self._is_welcome

    @property
    def seconds_since_contact(self) -> float:
        """Seconds since the newest answered ping or hello was sent, or infinity.

        The send time counts, because an answer that is read late must not extend the lease beyond the lease
        that the coordinator assumes.
        """
        return (
            float("inf")
            if self._contact_at is None
            else time.monotonic() - self._contact_at
        )

    def fileno(self) -> int:
        """Return the connection's file descriptor, or -1.

        A forked child must close it. Otherwise the connection stays open when the parent ends.
        """
        return (
            -1
            if self._writer is None
            else int(self._writer.get_extra_info("socket").fileno())
        )

    async def run(self) -> None:
        """Connect, and reconnect whenever the connection ends.

        Returns after ``close``, or after a ``refused`` or ``end`` was passed to ``on_message``. Raises the
        errors of the owner's callbacks.
        """
        try:
            while not self._is_over:
                with contextlib.suppress(
                    OSError,
                    ProtocolError,
                    ValueError,
                    TimeoutError,
                    asyncio.IncompleteReadError,
                ):
                    await self._run_session()
                # Add jitter, so that a thousand nodes do not reconnect at the same moment. ``close`` ends the
                # wait.
                if not self._is_over:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(
                            self._wake.wait(), 0.1 + random.random() * 0.1
                        )
        except _OwnerFailed as failed:
            # Without the wrapper, an OSError of the owner would look like a broken connection and be repeated
            # on each new connection.
            raise failed.error from None
        finally:
            self._is_over = True
            self._disconnect()

    def send(self, message: Message) -> bool:
        """Send a message. Returns False if the client is not connected; the message is then lost."""
        return self._is_welcome and self._write(message)

    async def commit(self, generation: int) -> bool:
        """Ask whether ``generation`` may still write.

        Returns False if it may not, or if no answer arrives within ``COMMIT_SECONDS``.
        """
        # Number the requests, because an answer after the time limit must not permit the next save.
        self._num_commits += 1
        request = self._num_commits
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._commits[request] = answer
        try:
            if not self.send(Commit(request=request, generation=generation)):
                return False
            return await asyncio.wait_for(answer, COMMIT_SECONDS)
        except TimeoutError:
            return False
        finally:
            del self._commits[request]

    def close(self) -> None:
        """End ``run``, and close the connection after all sent messages are written."""
        self._is_over = True
        self._wake.set()
        if self._writer is not None:
            self._writer.close()
        self._is_welcome = False

    # ---- one connection ------------------------------------------------------------------------------------

    async def _run_session(self) -> None:
        connecting = asyncio.open_connection(self._host, self._port, limit=MAX_LINE_BYTES)
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
        self._writer = writer
        pinger: asyncio.Task[None] | None = None

        async def ping() -> None:
            # Abort a silent connection, but only after two misses in a row. If the owner has blocked the
            # loop, the reader runs before the second check.
            misses = 0
            while True:
                await asyncio.sleep(PING_SECONDS)
                if self._is_welcome and self._write(Ping()):
                    self._pings.append(time.monotonic())
                is_silent = time.monotonic() - self._session_heard_at > SILENCE_SECONDS
                misses = misses + 1 if is_silent else 0
                if misses > 1 and self._writer is not None:
                    self._writer.transport.abort()

        try:
            writer.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )
            # Silence counts from here, before the first message.
            self._session_heard_at = hello_at = time.monotonic()
            self._pings = deque([hello_at])  # the welcome answers the hello
            self._write(self._hello())
            pinger = asyncio.create_task(ping())
            while not self._is_over and (line := await reader.readline()):
                self._take(line)
        finally:
            if pinger is not None:
                pinger.cancel()
            self._disconnect()

    def _take(self, line: bytes) -> None:
        # Any line ends the silence, even if it is ignored below, because the coordinator is alive.
        self._session_heard_at = time.monotonic()
        try:
            message = decode_from_coordinator(line)
        except UnknownTypeError as error:
            # A newer coordinator may send unknown messages. It would send them on each connection, so closing
            # the connection would keep the node from training. Before the welcome, the peer may not be a
            # coordinator, so the error is raised.
            if not self._is_welcome:
                raise
            # Log only once, because such messages may arrive many times a second.
            if not self._has_met_unknown:
                self._has_met_unknown = True
                _log.warning("messages of a newer coordinator are ignored; %s", error)
            return

        # Count the contact from the send time of the question, because the coordinator counts from its
        # arrival, which is later.
        if isinstance(message, Pong | Welcome) and self._pings:
            self._contact_at = max(self._pings.popleft(), self._contact_at or 0.0)
        if isinstance(message, Permit):
            answer = self._commits.get(message.request)
            if answer is not None and not answer.done():
                answer.set_result(message.granted)
            return
        if isinstance(message, Pong):
            return
        if isinstance(message, Refused | End):
            self._is_over = True
        if isinstance(message, Welcome):
            self._is_welcome = True
        try:
            self._on_message(message)
            if isinstance(message, Welcome):
                self._on_connected()
        except Exception as error:
            raise _OwnerFailed(error) from error

    def _write(self, message: Message) -> bool:
        writer = self._writer
        if writer is None or writer.is_closing():
            return False
        writer.write(encode(message))
        # The coordinator does not read. A new connection may reach another coordinator.
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            writer.transport.abort()
            return False
        return True

    def _disconnect(self) -> None:
        self._is_welcome = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        # The answers would not arrive on another connection. Without a permission, a save is not published.
        for answer in self._commits.values():
            if not answer.done():
                answer.set_result(False)
