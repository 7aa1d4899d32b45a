"""The process that reports twice a second that its node is alive, whatever keeps the node's own process from
reporting it.

``heartbeat`` starts it by its path, so that it imports only what stands here: it is small and begins at once
on a busy machine. It reads one line of JSON from its standard input: where the coordinator is, and the
``beat`` that begins a connection. It ends with the process that started it, and is silent while that process
is stopped: a node that is frozen is to be noticed.
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
"""Longest time without an answer; a connection that is silent for longer is replaced."""
_CONNECT_SECONDS = 3.0
_RETRY_SECONDS = 0.5


def read_order() -> dict[str, Any]:
    """The first line of standard input. Raises ValueError if there is none."""
    data = b""
    # A pipe may hand on a line in parts.
    while not data.endswith(b"\n"):
        more = os.read(0, 65536)
        if not more:
            raise ValueError("no order")
        data += more
    order: dict[str, Any] = json.loads(data)
    return order


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger. False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):
        return False


def wait_for_end(seconds: float) -> bool:
    """Wait, and return whether the node has closed this process's input meanwhile."""
    return bool(select.select([0], [], [], seconds)[0])


def beat(connection: socket.socket, hello: bytes, *, parent: int) -> bool:
    """Say hello, then one ping after the other.

    False once the connection is of no use; True at the node's end.
    """
    connection.sendall(hello)
    heard = time.monotonic()
    # Another parent means that the node's process is gone, however its end was missed.
    while os.getppid() == parent:
        begun = time.monotonic()
        # Nothing is sent for a node that is frozen: the missing answers are no fault of the connection.
        if is_stopped(parent):
            heard = begun
        else:
            connection.sendall(_PING)
        if wait_for_end(_BEAT_SECONDS):
            return True

        # The answers are read only so that a dead connection is found, and its buffer stays empty.
        if select.select([connection], [], [], 0)[0]:
            if not connection.recv(4096):
                return False
            heard = time.monotonic()
        if time.monotonic() - heard > _SILENCE_SECONDS:
            return False
    return True


def connect_and_beat(order: dict[str, Any], *, parent: int) -> bool:
    """Beat on a new connection, and return whether the node has ended."""
    hello = json.dumps(order["beat"]).encode("ascii") + b"\n"
    try:
        with socket.create_connection(
            (order["host"], order["port"]), timeout=_CONNECT_SECONDS
        ) as connection:
            return beat(connection, hello, parent=parent)
    except OSError:
        return False


def main() -> None:
    """Beat until the node ends."""
    parent, order = os.getppid(), read_order()
    while os.getppid() == parent:
        # A connection begins with a beat, and the coordinator ends that of a node that is frozen for long.
        if not is_stopped(parent) and connect_and_beat(order, parent=parent):
            return
        # A coordinator that is being restarted refuses connections at once: without a pause this would spin.
        if wait_for_end(_RETRY_SECONDS):
            return


if __name__ == "__main__":
    main()
