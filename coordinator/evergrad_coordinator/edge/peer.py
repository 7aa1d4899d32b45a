"""One connection of the coordinator: bytes to lines, and nothing that grows without bound."""

import asyncio
import contextlib
import socket
import time
import typing
from dataclasses import dataclass

from evergrad_common.addresses import plain_host
from evergrad_common.codec import MAX_LINE_BYTES
from evergrad_coordinator.rules.state import Key


@dataclass(frozen=True)
class ConnectionLimits:
    """Bounds of one connection, and of all that have not said hello."""

    hello_seconds: float = 5.0
    unknown_peers: int = 1024
    """Connections that have not said hello; the oldest makes way for one more."""
    unsent_bytes: int = 1024 * 1024
    messages: int = 1000
    """At once; ``messages_per_second`` in the long run."""
    messages_per_second: float = 100.0
    closing_seconds: float = 5.0
    persist_retry_seconds: float = 0.5
    waiting_effects: int = 65_536
    """Effects that wait for the journal, such as 16 plans to 4096 nodes, in some ten megabytes."""
    log_lines_per_second: float = 20.0


class PeerOwner(typing.Protocol):
    """The owner of a connection, to which it reports."""

    def add(self, peer: "Peer") -> None: ...
    def forget(self, peer: "Peer", why: str) -> None: ...
    def take_line(self, peer: "Peer", line: bytes) -> None: ...
    def reject(self, peer: "Peer", reason: str, detail: str = "") -> None: ...


class Peer(asyncio.Protocol):
    """One connection: bytes to lines, and nothing that grows without bound."""

    def __init__(self, server: PeerOwner, limits: ConnectionLimits) -> None:
        self._server = server
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._allowed = float(limits.messages)
        self.heard_at = time.monotonic()
        """When the last whole line came; before the first one, the connection's begin."""
        self.number = 0
        self.has_joined = False
        self.beats_for: Key | None = None
        """The node that the process on the other side is beside."""
        self.connected_at = self.heard_at
        self.is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Join the server's peers."""
        self._transport = typing.cast(asyncio.Transport, transport)
        # Messages are small and answered at once: none may wait to be joined by a second one.
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        """Hand all whole lines to the server."""
        buffer, start = self._buffer, 0
        buffer += data
        # Any line may end the connection: those behind it count for nothing.
        while not self.is_closing and (end := buffer.find(b"\n", start)) >= 0:
            line = bytes(buffer[start:end])
            start = end + 1
            self._server.take_line(self, line)
        if self.is_closing:
            buffer.clear()
            return
        del buffer[:start]
        # The rest is the beginning of a line: without a bound one that never ends would fill the memory.
        if len(buffer) >= MAX_LINE_BYTES:
            self._server.reject(self, "line_too_long")

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave the server's peers."""
        self._buffer.clear()
        self._server.forget(
            self, "connection closed" if exc is None else type(exc).__name__
        )

    def is_within_rate(self, now: float, *, burst: int, rate: float) -> bool:
        """Note that a line has come, and return whether one more is acceptable."""
        # A bucket that fills with time: a burst after a change of the group is well, an endless one is not.
        self._allowed = min(float(burst), self._allowed + (now - self.heard_at) * rate) - 1
        self.heard_at = now
        return self._allowed >= 0

    def write(self, data: bytes, *, limit: int) -> bool:
        """Send ``data``. False if the peer does not read what it is sent."""
        # One that is about to close has ended for other reasons: nothing to complain about.
        if self._transport is None or self._transport.is_closing():
            return True
        self._transport.write(data)
        return self._transport.get_write_buffer_size() <= limit

    def close(self, *, patience: float) -> None:
        """End it once everything is written, or without that after ``patience`` seconds."""
        self.is_closing = True
        if self._transport is None:
            return
        self._transport.close()
        # ``close`` alone would wait for ever for a peer that does not read.
        if patience <= 0:
            self._transport.abort()
        elif self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(patience, self._transport.abort)

    @property
    def host(self) -> str:
        """Numeric address of the other side, empty where it is not known."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return plain_host(str(name[0])) if name else ""
