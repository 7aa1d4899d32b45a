"""Cuts the TCP connections of a group from outside, so that operations stuck on a dead or frozen peer end at
once."""

import contextlib
import os
import socket
from collections.abc import Set as AbstractSet

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def connected_sockets() -> frozenset[int]:
    """Descriptors of this process that are TCP connections.

    Listening sockets are none: shutting gloo's down ends the process.
    """
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), _duplicate(int(name)) as copy:
            if copy.family in _FAMILIES and copy.type == socket.SOCK_STREAM:
                copy.getpeername()
                found.add(int(name))
    return frozenset(found)


def cut_sockets(*, except_for: AbstractSet[int]) -> int:
    """Shut down every TCP connection of this process but those; how many there were.

    Only while nobody else opens connections: a descriptor's number may be given to another one.
    """
    count = 0
    for number in connected_sockets() - except_for:
        with contextlib.suppress(OSError), _duplicate(number) as copy:
            copy.shutdown(socket.SHUT_RDWR)
            count += 1
    return count


def _duplicate(number: int) -> socket.socket:
    """A second handle: closing it leaves the owner's alone. Raises OSError for what is no socket."""
    if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
        raise OSError(f"descriptor {number} is not a socket")
    return socket.socket(fileno=os.dup(number))


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to ``host``: asks the routing table, sends nothing.

    Raises OSError.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[
        0
    ]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
