"""The helper process that reports twice a second that its node is alive, even if the node's process is busy.

``heartbeat_process`` starts it by its path. It imports only the modules below, so that it is small and starts
quickly on a busy machine. It reads one line of JSON from its standard input: the address of the coordinator
and the ``beat``, which is the first message of each connection.

It ends with the process that started it. While that process is stopped, it sends nothing, so that the
coordinator detects a frozen node.
"""

import json
import os
import select
import socket
import time
from typing import Any

_PING = b'{"type":"ping"}\n'
_BEAT_SECONDS = 0.5
_SILENCE_SECONDS = 3.0
"""Seconds without an answer after which the connection is replaced."""
_CONNECT_SECONDS = 3.0
_RETRY_SECONDS = 0.5


def read_order() -> dict[str, Any]:
    """Return the JSON object of the first line of standard input. Raises ValueError if there is none."""
    data = b""
    # A pipe may deliver a line in parts.
    while not data.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            raise ValueError("no order")
        data += more
    order: dict[str, Any] = json.loads(data)
    return order


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by a signal or a debugger; False if this cannot be determined."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def wait_for_end(seconds: float) -> bool:
    """Wait up to ``seconds``, and return whether the node has closed this process's input."""
    return bool(select.select([0], [], [], seconds)[0])


def beat(connection: socket.socket, hello: bytes, *, parent: int) -> bool:
    """Send ``hello``, then pings.

    Returns False if the connection is no longer usable, and True if the node has ended. Raises OSError.
    """
    connection.sendall(hello)
    heard = time.monotonic()
    # If this process has another parent, the node's process is gone.
    while os.getppid() == parent:
        begun = time.monotonic()
        # Send nothing while the node is frozen. Missing answers are then not a fault of the connection.
        if is_stopped(parent):
            heard = begun
        else:
            connection.sendall(_PING)
        if wait_for_end(_BEAT_SECONDS):
            return True

        # Read the answers only to detect a dead connection and to keep its buffer empty.
        if select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return False
            heard = time.monotonic()
        if time.monotonic() - heard > _SILENCE_SECONDS:
            return False
    return True


def connect_and_beat(order: dict[str, Any], *, parent: int) -> bool:
    """Open a connection, send beats, and return whether the node has ended."""
    hello = json.dumps(order["beat"]).encode("ascii") + b"\n"
    try:
        with socket.create_connection(
            (order["host"], order["port"]), timeout=_CONNECT_SECONDS
        ) as connection:
            return beat(connection, hello, parent=parent)
    except OSError:
        return False


def main() -> None:
    """Send beats until the node ends."""
    parent, order = os.getppid(), read_order()
    while os.getppid() == parent:
        # Do not connect while the node is frozen, because each connection starts with a beat. The coordinator
        # closes the connection of a node that is frozen for a long time.
        if not is_stopped(parent) and connect_and_beat(order, parent=parent):
            return
        # A restarting coordinator refuses connections immediately, so without a pause this loop would spin.
        if wait_for_end(_RETRY_SECONDS):
            return


if __name__ == "__main__":
    main()
