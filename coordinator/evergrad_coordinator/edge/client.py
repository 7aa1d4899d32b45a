"""A node's side: one connection to the coordinator that comes back by itself, for ever."""

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
"""Longer than a coordinator on a busy machine stands still, and short enough to reach its successor within a
lease."""
CONNECT_SECONDS = 3.0
COMMIT_SECONDS = 2.0
"""A save waits for the answer, and is not published without one."""
UNSENT_BYTES = 1024 * 1024
"""Most bytes that wait for a coordinator that does not read; then the connection is replaced."""


class _OwnerFailed(Exception):  # noqa: N818 - no error of this package
    """Carries an ``error`` of a callback of the client's owner past the errors of a connection."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class CoordinatorClient:
    """Runs in the loop that awaits ``run``; all methods belong to that loop's thread.

    ``hello`` is called at each connection, so that it describes the node as it is then. ``on_message`` gets
    every message of the coordinator except answers to ``commit`` and ``ping``. ``on_connected`` is called
    after each welcome, so that the owner sends its state again.
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
        """Whether the log has said that the coordinator sends messages this version does not have."""
        self._contact_at: float | None = None
        self._pings: deque[float] = deque()
        """Times at which the pings without an answer were sent; answers come in the same order."""
        self._session_heard_at = 0.0
        self._commits: dict[int, asyncio.Future[bool]] = {}
        self._num_commits = 0
        self._wake = asyncio.Event()

    @property
    def is_connected(self) -> bool:
        """Whether the coordinator has said welcome on a connection that still stands."""
        return self._is_welcome

    @property
    def seconds_since_contact(self) -> float:
        """Time since the newest question was sent that the coordinator has answered; infinite if none was.

        An answer that was read late must not make the lease longer than the coordinator believes it to be.
        """
        return (
            float("inf")
            if self._contact_at is None
            else time.monotonic() - self._contact_at
        )

    def fileno(self) -> int:
        """The connection's descriptor, -1 without one.

        A forked child closes it, or the end of its parent stays hidden.
        """
        return (
            -1
            if self._writer is None
            else int(self._writer.get_extra_info("socket").fileno())
        )

    async def run(self) -> None:
        """Keep a connection until ``close``, or until ``refused`` or ``end`` was delivered.

        Raises the errors of the owner's callbacks.
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
                # A random part, so that a thousand nodes do not come back in the same moment. ``close`` ends
                # the wait.
                if not self._is_over:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(
                            self._wake.wait(), 0.1 + random.random() * 0.1
                        )
        except _OwnerFailed as failed:
            # As it is, an OSError of the owner would pass for a broken connection, and come again on each new
            # one.
            raise failed.error from None
        finally:
            self._is_over = True
            self._disconnect()

    def send(self, message: Message) -> bool:
        """Send a message. False when not connected; the message is then lost."""
        return self._is_welcome and self._write(message)

    async def commit(self, generation: int) -> bool:
        """Whether ``generation`` may still write. False also when nobody answers."""
        # Numbered, since an answer that comes after its time limit must not permit the next save.
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
        """End the connection, once what was sent is written, and ``run``."""
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
            # A connection on which nothing comes is ended. Two misses in a row: after a time in which the
            # owner has blocked the loop, the reader gets its turn before the second one.
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
            # Before the first message: silence counts from here.
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
        # Any line ends the silence, also one that is passed over below: its sender is alive.
        self._session_heard_at = time.monotonic()
        try:
            message = decode_from_coordinator(line)
        except UnknownTypeError as error:
            # A newer coordinator may say more. It would say it on the next connection as well, so that a node
            # which hung up could not train. Before its welcome nothing shows that it is a coordinator.
            if not self._is_welcome:
                raise
            # Once: the messages may come many times a second.
            if not self._has_met_unknown:
                self._has_met_unknown = True
                _log.warning("messages of a newer coordinator are ignored; %s", error)
            return

        # Contact is counted from the question, not from the answer: that is what the coordinator knows, too.
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
        # The coordinator does not read: a new connection may reach another one.
        if writer.transport.get_write_buffer_size() > UNSENT_BYTES:
            writer.transport.abort()
            return False
        return True

    def _disconnect(self) -> None:
        self._is_welcome = False
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        # No answer will come on another connection. Without permission a save is not published.
        for answer in self._commits.values():
            if not answer.done():
                answer.set_result(False)
