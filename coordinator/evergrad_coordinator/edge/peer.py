"""One connection of the coordinator: splits bytes into lines, with bounded buffers and rates."""

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
    """Bounds of one connection, and of all connections that have not sent a hello. Times are in seconds."""

    hello_seconds: float = 5.0
    unknown_peers: int = 1024
    """Maximum number of connections without a hello. One more closes the oldest of them."""
    unsent_bytes: int = 1024 * 1024
    messages: int = 1000
    """Maximum number of messages in a burst. ``messages_per_second`` bounds the average."""
    messages_per_second: float = 100.0
    closing_seconds: float = 5.0
    persist_retry_seconds: float = 0.5
    waiting_effects: int = 65_536
    """Maximum number of effects that wait for the journal, such as 16 plans to 4096 nodes, about 10 MB."""
    log_lines_per_second: float = 20.0


class PeerOwner(typing.Protocol):
    """The owner of a connection. The connection calls these methods."""

    def add(self, peer: "Peer") -> None: ...
    def forget(self, peer: "Peer", why: str) -> None: ...
    def take_line(self, peer: "Peer", line: bytes) -> None: ...
    def reject(self, peer: "Peer", reason: str, detail: str = "") -> None: ...


class Peer(asyncio.Protocol):
    """One connection. It splits bytes into lines, passes them to its owner, and bounds its buffers."""

    def __init__(self, server: PeerOwner, limits: ConnectionLimits) -> None:
        self._server = server
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None
        self._allowed = float(limits.messages)
        self.heard_at = time.monotonic()
        """Time of the last complete line; before the first line, the start of the connection."""
        self.number = 0
        self.has_joined = False
        self.beats_for: Key | None = None
        """The node for which this connection only sends beats; None for a node's own connection."""
        self.connected_at = self.heard_at
        self.is_closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Add this connection to its owner's peers."""
        self._transport = typing.cast(asyncio.Transport, transport)
        # Messages are small and answered immediately. Disable Nagle's algorithm, so that none is delayed.
        with contextlib.suppress(OSError):
            transport.get_extra_info("socket").setsockopt(
                socket.IPPROTO_TCP, socket.TCP_NODELAY, 1
            )
        self._server.add(self)

    def data_received(self, data: bytes) -> None:
        """Pass all complete lines to the owner."""
        buffer, start = self._buffer, 0
        buffer += data
        # A line may close the connection. Ignore the lines after it.
        while not self.is_closing and (end := buffer.find(b"\n", start)) >= 0:
            line = bytes(buffer[start:end])
            start = end + 1
            self._server.take_line(self, line)
        if self.is_closing:
            buffer.clear()
            return
        del buffer[:start]
        # The rest is the start of a line. Without a bound, a line that never ends would fill the memory.
        if len(buffer) >= MAX_LINE_BYTES:
            self._server.reject(self, "line_too_long")

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove this connection from its owner's peers."""
        self._buffer.clear()
        self._server.forget(
            self, "connection closed" if exc is None else type(exc).__name__
        )

    def is_within_rate(self, now: float, *, burst: int, rate: float) -> bool:
        """Record that a line has arrived, and return whether the rate is within its limits.

        ``burst``: lines that are allowed at once. ``rate``: lines per second on average.
        """
        # This is a token bucket. It allows a burst after a change of the group, but not an endless one.
        self._allowed = min(float(burst), self._allowed + (now - self.heard_at) * rate) - 1
        self.heard_at = now
        return self._allowed >= 0

    def write(self, data: bytes, *, limit: int) -> bool:
        """Send ``data``. Returns False if more than ``limit`` bytes are still unsent."""
        # If the connection is already closing, there is no further problem to report.
        if self._transport is None or self._transport.is_closing():
            return True
        self._transport.write(data)
        return self._transport.get_write_buffer_size() <= limit

    def close(self, *, patience: float) -> None:
        """Close the connection after all data is written, or after ``patience`` seconds at the latest."""
        self.is_closing = True
        if self._transport is None:
            return
        self._transport.close()
        # ``close`` alone would wait forever for a peer that does not read.
        if patience <= 0:
            self._transport.abort()
        elif self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(patience, self._transport.abort)

    @property
    def host(self) -> str:
        """Numeric address of the peer, or "" if it is not known."""
        name = self._transport.get_extra_info("peername") if self._transport else None
        return plain_host(str(name[0])) if name else ""
