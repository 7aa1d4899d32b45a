"""Reads, writes and listens on addresses with ports: IPv4, IPv6 and host names."""

import errno
import ipaddress
import socket
from typing import Final

ANY: Final = ""
"""Host of a listener that accepts connections to every address of its machine, over IPv6 and IPv4."""
_WITHOUT_IPV6: Final = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL, errno.EPROTONOSUPPORT)


def split_address(text: str) -> tuple[str, int] | None:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT`` into host and port; None for anything else.

    For example, an IPv6 address without brackets gives None, because its last group could be read as a port.
    """
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            if ipaddress.ip_address(host).version != 6:
                return None
        except ValueError:
            return None
    elif ":" in host:
        return None
    if not colon or not host or not port.isascii() or not port.isdecimal():
        return None
    return (host, int(port)) if 0 < int(port) < 65536 else None


def join_address(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with an IPv6 address in brackets, as URLs and ``split_address`` require."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def open_listener(host: str, port: int, *, backlog: int = 128) -> socket.socket:
    """Open a listening TCP socket on ``host``. Port 0 selects a free port. Raises OSError.

    For ANY, one socket serves both families, so that port 0 selects the same port for both. On a machine
    without IPv6, the socket serves only IPv4.
    """
    if host == ANY:
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog
            )
        except ValueError:
            pass  # the platform has no such socket
        except OSError as error:
            # A port that is in use is an error in both families.
            if error.errno not in _WITHOUT_IPV6:
                raise
        return socket.create_server(("0.0.0.0", port), backlog=backlog)
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, place = found[0]
    return socket.create_server((str(place[0]), port), family=family, backlog=backlog)


def plain_host(host: str) -> str:
    """Return the host in its usual form. A socket of both families shows IPv4 addresses as IPv6.

    For example, ``::ffff:10.0.0.1`` → ``10.0.0.1``.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped) if mapped is not None else host
