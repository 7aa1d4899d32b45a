"""Forwards a port of this machine to a pod, as `kubectl port-forward` does for one port."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

_MOST_CONNECTIONS = 32
"""Most connections at the same time; each has two threads. A browser opens six, and a page keeps one."""
_CHUNK_BYTES = 65_536

Connect = Callable[[], socket.socket]


@contextlib.contextmanager
def forwarded(
    connect: Connect, *, port: int, report: Callable[[Exception], None]
) -> Iterator[int]:
    """Forward each connection to ``port`` of 127.0.0.1 to a connection that ``connect`` makes; yield the
    port.

    ``port`` 0 selects a free port. If ``connect`` raises an error, ``report`` receives it and that connection
    ends; the next connection calls ``connect`` again. Raises OSError if the port cannot be used.
    """
    listener = socket.create_server(("127.0.0.1", port))
    places = threading.BoundedSemaphore(_MOST_CONNECTIONS)
    is_over = threading.Event()

    def serve(near: socket.socket) -> None:
        with places, near:
            try:
                far = connect()
            except Exception as error:  # noqa: BLE001 - reported; the next connection may reach the pod
                report(error)
                return
            with contextlib.closing(far):
                join_connections(near, far)

    def accept() -> None:
        while not is_over.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(near,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        is_over.set()
        # ``close`` alone does not wake a thread that waits in ``accept``.
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        accepting.join()


def join_connections(near: socket.socket, far: socket.socket) -> None:
    """Copy bytes in both directions until either side ends."""

    def pump(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                target.sendall(data)
        # If either side ends, end both: a request has one answer, and a closed page reads nothing more.
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    back = threading.Thread(target=pump, args=(far, near), daemon=True)
    back.start()
    pump(near, far)
    back.join()
