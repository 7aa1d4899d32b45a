"""A command as the first process of a pod: last words, patience with its host, and a page of its progress."""

import argparse
import contextlib
import http.server
import json
import signal
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

from evergrad_common.contract import ErrorKind
from evergrad_common.secret import is_token
from evergrad_manifest.errors import EvergradError
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.base.host_errors import describe_host_trouble, trouble_of
from evergrad_trainer.node.failures import write_termination_message

Value = TypeVar("Value")
HOST_PAUSES: Final = (2.0, 5.0, 10.0)
"""Seconds before what this host could not do is tried again; then the pod leaves its place to
another host."""
REQUEST_SECONDS: Final = 5.0
"""Longest silence of a caller of the page: whoever connects and says nothing holds up others no longer."""
CLOSE_SECONDS: Final = 1.0
"""Longest wait for the answer that is being given as the page ends: twice the pause between two looks of its
server."""


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of a command whose manifest does not lie beside its data, as in a pod."""
    parser.add_argument(
        "--base-directory",
        type=Path,
        metavar="DIR",
        help="base directory of relative paths in the manifest (default: the manifest's folder)",
    )
    parser.add_argument(
        "--termination-log",
        type=Path,
        metavar="FILE",
        help="file for the root cause of a failure, at most 4 KiB",
    )


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """End the process on SIGTERM as on Ctrl-C while it prepares.

    The exception lets helpers and files be cleaned up.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def last_words(termination_log: Path | None) -> Iterator[None]:
    """Write the error that ends the body where Kubernetes looks for a pod's root cause, and raise it.

    An error of the operating system that is trouble of this host becomes a HostError.
    """
    try:
        yield
    except EvergradError as error:
        is_of_host = error.kind is ErrorKind.ENVIRONMENT
        trouble = trouble_of(error) if is_of_host else ""
        write_termination_message(termination_log, error.kind, str(error), trouble)
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        if describe_host_trouble(error) is not None:
            write_termination_message(
                termination_log, ErrorKind.ENVIRONMENT, text, trouble_of(error)
            )
            raise HostError(f"host {socket.gethostname()}: {text}") from error
        write_termination_message(termination_log, ErrorKind.INTERNAL, text)
        raise


def try_patiently(attempt: Callable[[], Value]) -> Value:
    """Return what ``attempt`` returns, tried again after a pause where this host is in trouble: a mount or a
    device may come back.

    Raises HostError where it does not, and whatever else ``attempt`` raises.
    """
    for pause in (*HOST_PAUSES, None):
        try:
            return attempt()
        except (EvergradError, OSError) as error:
            trouble = describe_host_trouble(error)
            if trouble is None:
                raise

            text = f"host {socket.gethostname()}: {trouble}"
            if pause is None:
                raise HostError(text) from error
            print(
                f"warning: {text} Tried again in {pause:g} s.", file=sys.stderr, flush=True
            )
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


class StatusPage:
    """One JSON object at ``/status`` of a port, for whoever shows the run's token.

    A port that cannot be listened on costs the page and nothing else: what it shows is for people.
    """

    def __init__(self, token: str, *, port: int) -> None:
        """Begin to serve an empty object on all addresses; port 0 takes a free one."""
        self._state = b"{}\n"
        self._server: _Server | None = None
        try:
            self._server = _Server(("", port), _Handler)
        except OSError as error:
            text = f"progress is not shown: port {port} cannot be listened on: {error}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            return

        def answer(path: str, authorization: str) -> tuple[HTTPStatus, bytes]:
            # Before anything else: a path that does not exist must not look different to a stranger.
            scheme, _, said = authorization.partition(" ")
            if scheme.lower() != "bearer" or not is_token(said.strip(), token):
                return HTTPStatus.UNAUTHORIZED, b"the run's token is needed\n"
            if path.partition("?")[0] != "/status":
                return HTTPStatus.NOT_FOUND, b"there is /status\n"
            return HTTPStatus.OK, self._state

        self._server.answer = answer
        # A daemon: a request that hangs must not keep the process alive.
        threading.Thread(
            target=self._server.serve_forever, name="status page", daemon=True
        ).start()

    @property
    def port(self) -> int | None:
        """The port that it listens on; None where it could not."""
        return self._server.server_address[1] if self._server is not None else None

    def show(self, state: Mapping[str, Any]) -> None:
        """Show this object from now on."""
        self._state = (json.dumps(state) + "\n").encode()

    def close(self) -> None:
        """Stop to listen. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        # A caller that sends byte after byte must not keep a pod whose work is done: the process ends with
        # its daemons.
        ending = threading.Thread(
            target=server.shutdown, name="end of status page", daemon=True
        )
        ending.start()
        ending.join(CLOSE_SECONDS)
        server.server_close()


class _Server(socketserver.TCPServer):
    # One request after the other: strangers can hold up this page, but never make threads without bound.
    allow_reuse_address = True
    answer: Callable[[str, str], tuple[HTTPStatus, bytes]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Write nothing: a caller that went away is no error of this process."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer one request; the connection ends with it."""
        authorization = self.headers.get("Authorization", "")
        status, body = self.server.answer(self.path, authorization)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: a line a poll would only fill the log."""
