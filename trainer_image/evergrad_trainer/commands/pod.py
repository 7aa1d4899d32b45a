"""Support for commands that are the first process of a pod: termination message, retries and status page."""

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
"""Pauses before retries after an error of this host. After the last retry the pod ends, so that another host
can take its place."""
REQUEST_SECONDS: Final = 5.0
"""Timeout for a client of the page, so that a silent connection does not block other clients for longer."""
CLOSE_SECONDS: Final = 1.0
"""Maximum time that ``close`` waits for the current response: twice the poll interval of the server."""


def add_pod_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of a command whose manifest is in another directory than its data, as in a pod."""
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
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C, during the preparation.

    The exception lets the process clean up helper processes and files.
    """
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def last_words(termination_log: Path | None) -> Iterator[None]:
    """Write an error that ends the block to the pod's termination log, and raise it again.

    An OSError that this host causes is converted to a HostError.
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
    """Call ``attempt`` and return its result; after an error of this host, retry after each of HOST_PAUSES.

    For example, a mount or a device may become available again. Raises HostError if the last retry fails, and
    all other errors of ``attempt``.
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
    """Serves one JSON object at ``/status`` of a port, for clients that present the run's token.

    If the port cannot be opened, there is no page, but the command continues.
    """

    def __init__(self, token: str, *, port: int) -> None:
        """Begin to serve an empty object on all addresses; port 0 selects a free port."""
        self._state = b"{}\n"
        self._server: _Server | None = None
        try:
            self._server = _Server(("", port), _Handler)
        except OSError as error:
            text = f"progress is not shown: port {port} cannot be listened on: {error}"
            print(f"warning: {text}", file=sys.stderr, flush=True)
            return

        def answer(path: str, authorization: str) -> tuple[HTTPStatus, bytes]:
            # Check the token first, so that clients without it cannot detect which paths exist.
            scheme, _, said = authorization.partition(" ")
            if scheme.lower() != "bearer" or not is_token(said.strip(), token):
                return HTTPStatus.UNAUTHORIZED, b"the run's token is needed\n"
            if path.partition("?")[0] != "/status":
                return HTTPStatus.NOT_FOUND, b"there is /status\n"
            return HTTPStatus.OK, self._state

        self._server.answer = answer
        # Use a daemon thread, so that a request that hangs does not keep the process alive.
        threading.Thread(
            target=self._server.serve_forever, name="status page", daemon=True
        ).start()

    @property
    def port(self) -> int | None:
        """The port of the page; None if it could not be opened."""
        return self._server.server_address[1] if self._server is not None else None

    def show(self, state: Mapping[str, Any]) -> None:
        """Replace the served object with ``state``."""
        self._state = (json.dumps(state) + "\n").encode()

    def close(self) -> None:
        """Stop serving. A second call does nothing."""
        server, self._server = self._server, None
        if server is None:
            return
        # Shut down in a daemon thread: a client that sends slowly must not keep a finished pod alive.
        ending = threading.Thread(
            target=server.shutdown, name="end of status page", daemon=True
        )
        ending.start()
        ending.join(CLOSE_SECONDS)
        server.server_close()


class _Server(socketserver.TCPServer):
    # Handle one request at a time. Clients can delay the page, but cannot create many threads.
    allow_reuse_address = True
    answer: Callable[[str, str], tuple[HTTPStatus, bytes]]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because a client that disconnects is not an error of this process."""


class _Handler(http.server.BaseHTTPRequestHandler):
    timeout = REQUEST_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer one request and close the connection."""
        authorization = self.headers.get("Authorization", "")
        status, body = self.server.answer(self.path, authorization)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because one line per request would fill the log."""
