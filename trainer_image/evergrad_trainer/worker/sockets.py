"""Cuts the TCP connections of a group, so that operations that are stuck on a dead or frozen peer end
immediately."""

import contextlib
import os
import socket
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def connected_sockets() -> frozenset[int]:
    """Return the inodes of this process's TCP connections.

    The kernel does not reuse an inode while the machine runs, but reuses the number of a descriptor as soon
    as it is closed. Listening sockets are left out, because the process ends if gloo's listening socket is
    shut down.
    """
    return frozenset(inode for inode, _ in _open_connections())


def cut_sockets(inodes: AbstractSet[int]) -> int:
    """Shut down the connections with these ``inodes`` that are still open; return how many there were."""
    count = 0
    for inode, handle in _open_connections():
        if inode in inodes:
            # The peer may have closed the connection meanwhile, which has the same effect.
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open_connections() -> Iterator[tuple[int, socket.socket]]:
    """Yield the inode of each TCP connection of this process, and a duplicate of its descriptor.

    The duplicate is valid for one iteration. Closing it does not close the original.
    """
    for name in os.listdir("/proc/self/fd"):
        # Skip descriptors that are not sockets or not connections, or that were closed after the folder was
        # listed.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as handle:
                if handle.family in _FAMILIES and handle.type == socket.SOCK_STREAM:
                    handle.getpeername()
                    # Read the inode from the duplicate, because the number may by now belong to another
                    # socket.
                    yield os.fstat(handle.fileno()).st_ino, handle


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to ``host``. Uses the routing table, and sends nothing.

    Raises OSError if there is no route or the name cannot be resolved.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
