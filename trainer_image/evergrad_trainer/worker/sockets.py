"""Cuts the TCP connections of a group from outside, so that operations stuck on a dead or frozen peer end at
once."""

import contextlib
import os
import socket
from collections.abc import Iterator
from collections.abc import Set as AbstractSet

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def connected_sockets() -> frozenset[int]:
    """Find the TCP connections of this process, by the inodes of their sockets.

    An inode is one socket's for as long as the machine runs; a descriptor's number is given to another socket
    as soon as the first one is closed. Listening sockets are left out: shutting gloo's down ends the process.
    """
    return frozenset(inode for inode, _ in _open_connections())


def cut_sockets(inodes: AbstractSet[int]) -> int:
    """Shut down those of the connections with ``inodes`` that are still open; returns how many there were."""
    count = 0
    for inode, handle in _open_connections():
        if inode in inodes:
            # The peer may have closed it meanwhile, which is as good.
            with contextlib.suppress(OSError):
                handle.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open_connections() -> Iterator[tuple[int, socket.socket]]:
    """Each TCP connection of this process: its inode, and a second handle that lasts for one turn.

    Closing that handle leaves the owner's alone.
    """
    for name in os.listdir("/proc/self/fd"):
        # A handle that is no socket, no connection, or was closed since the folder was listed is passed over.
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as handle:
                if handle.family in _FAMILIES and handle.type == socket.SOCK_STREAM:
                    handle.getpeername()
                    # Read from the handle: by now the number may be another socket's.
                    yield os.fstat(handle.fileno()).st_ino, handle


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to ``host``: asks the routing table, sends nothing.

    Raises OSError.
    """
    family, kind, protocol, _, target = socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])
