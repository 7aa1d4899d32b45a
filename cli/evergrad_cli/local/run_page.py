"""Serves the page of a run on this machine from its run directory, if no coordinator serves it."""

import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BufferedIOBase
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from evergrad_cli.local.run_files import RunFiles
from evergrad_coordinator.edge.live_feed import MOST_PAGES, UPDATE_SECONDS, encode_event
from evergrad_coordinator.edge.page_files import build_page, is_own_request
from evergrad_coordinator.rules.history import rewind, take_update

_WRITE_SECONDS: Final = 30.0
"""Time within which a page must read its data before the connection is closed."""


def follow(directory: Path, stream: BufferedIOBase, is_over: threading.Event) -> None:
    """Write events to ``stream`` until it cannot be written. The first event contains the whole history."""
    files, began_at = RunFiles(directory), 0.0
    with contextlib.suppress(OSError):
        while not is_over.is_set():
            is_anew = files.is_another_run()
            if is_anew:
                files = RunFiles(directory)
            status = files.look(time.time())
            # If the start of the run changes, a page assumes another run and discards its data, so send the
            # whole history.
            if files.history.began_at != began_at:
                began_at = files.history.began_at
                rewind(files.history)
            # If only the file of steps was started again, the events still have the same start, so make the
            # page discard its data.
            elif is_anew:
                forget = {"beganAt": -1.0, "elapsed": 0.0, "status": status}
                stream.write(encode_event(forget))
            update = take_update(files.history, status, now=files.newest_time)
            stream.write(encode_event({**update, "beganAt": began_at}))
            is_over.wait(UPDATE_SECONDS)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that cancels a request closes its connection, which is not an error.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextlib.contextmanager
def serving_files(directory: Path, *, port: int) -> Iterator[int]:
    """Serve the page on ``port`` of 127.0.0.1 (0: a free port) and yield the port. Raises OSError."""
    page = build_page("run", needs_token=False)
    places = threading.BoundedSemaphore(MOST_PAGES)
    is_over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        timeout = _WRITE_SECONDS

        # Other pages in the same browser may send requests to this port. None of them may read the run.
        def do_GET(self) -> None:
            site = self.headers.get("Sec-Fetch-Site", "")
            if self.path == "/":
                data = page.text.encode()
                self._begin(200, "text/html; charset=utf-8", page.headers)
                self.wfile.write(data)
            elif self.path != "/live":
                self._begin(404, "text/plain")
            elif not is_own_request(self.headers.get("Host", ""), site):
                self._begin(403, "text/plain")
            # Each open page uses one thread as long as it is open.
            elif not places.acquire(blocking=False):
                self._begin(503, "text/plain")
            else:
                try:
                    self._begin(200, "text/event-stream")
                    follow(directory, self.wfile, is_over)
                finally:
                    places.release()

        def _begin(
            self, status: int, kind: str, headers: Mapping[str, str] = MappingProxyType({})
        ) -> None:
            self.send_response(status)
            for name, value in {
                "Content-Type": kind,
                "Cache-Control": "no-store",
                **headers,
            }.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Discard the log: requests of the user's own browser are not worth a line."""

    with _Server(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.1,))
        thread.start()
        try:
            yield server.server_port
        # End the pages first: a handler that waits would outlive the server.
        finally:
            is_over.set()
            server.shutdown()
            thread.join()
