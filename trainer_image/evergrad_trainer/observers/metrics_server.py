"""Serves a Prometheus registry over HTTP from one thread."""

import socket
import socketserver
import threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from evergrad_common.addresses import open_listener
from evergrad_manifest.errors import ConfigurationError, Problem

_FIELD = "spec.training.metrics.port"


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Write nothing, because one line per scrape would fill the log."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def __init__(self, listener: socket.socket) -> None:
        place = listener.getsockname()
        super().__init__(place[:2], _SilentHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        # The standard server asks DNS for the host's full name, which takes seconds if no server responds.
        self.server_name, self.server_port = "localhost", place[1]
        self.setup_environ()


class MetricsServer:
    """Server that answers every path with the registry's metrics until it is closed."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        port: int,
        host: str,
    ) -> None:
        """Listen on ``port`` of ``host``; 0 selects a free port. Raises ConfigurationError with the field's
        path."""
        try:
            self._server = _Server(open_listener(host, port))
            self._server.set_app(make_wsgi_app(registry))
        except OSError as error:
            why = f"{error.strerror or error}".lower()
            remedy = (
                "Choose another port, 0 for any free one, or leave it out for no endpoint"
            )
            raise ConfigurationError(
                Problem(
                    _FIELD,
                    f"port {port} cannot be listened on",
                    why,
                    remedy,
                )
            ) from error
        self.port = self._server.server_port
        self.address = f"http://localhost:{self.port}/metrics"
        # Use a daemon thread, so that a scrape that hangs does not keep the process alive.
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.1},
            name="metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the thread. A second call does nothing."""
        # shutdown() waits for the loop, and would wait forever if the loop does not run.
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()
