"""A stand-in for an API server: responses are set by path, and requests are recorded."""

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

RUNS = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns"
PODS = "/api/v1/namespaces/lab/pods"
EVENTS = "/api/v1/namespaces/lab/events"


@dataclass
class Request:
    """One received request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


Answer = tuple[int, Any]
Responder = Callable[[Request], Answer]


@dataclass
class FakeApi:
    """Responses of an API server by (method, path): JSON, text for str, or a function of the request."""

    url: str = ""
    answers: dict[tuple[str, str], Answer | Responder] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    kubeconfig: str = ""

    def on(self, method: str, path: str, answer: Any, *, status: int = 200) -> None:
        """Set the response to a request."""
        self.answers[method, path] = answer if callable(answer) else (status, answer)

    def refuse(
        self, method: str, path: str, status: int, message: str, **details: Any
    ) -> None:
        """Respond with a Status, as the API server does for a refusal."""
        body = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "message": message,
            "code": status,
            "details": details,
        }
        self.answers[method, path] = (status, body)

    def answer(self, request: Request) -> Answer:
        self.requests.append(request)
        found = self.answers.get((request.method, request.path))
        if found is None:
            return 404, "404 page not found\n"
        return found(request) if callable(found) else found

    def sent(self, method: str) -> list[Request]:
        """Return the requests of this method."""
        return [request for request in self.requests if request.method == method]


@pytest.fixture
def api(tmp_path: Path) -> Iterator[FakeApi]:
    fake = FakeApi()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            parts = urlsplit(self.path)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(data) if data else None
            request = Request(
                self.command,
                parts.path,
                dict(parse_qsl(parts.query)),
                dict(self.headers),
                body,
            )
            status, content = fake.answer(request)
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            self.send_header(
                "Content-Type",
                "text/plain" if isinstance(content, str) else "application/json",
            )
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:
            self._serve()

        def do_PATCH(self) -> None:
            self._serve()

        def do_POST(self) -> None:
            self._serve()

        def do_DELETE(self) -> None:
            self._serve()

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.02}
        )
        thread.start()
        fake.url = f"http://127.0.0.1:{server.server_port}"
        fake.kubeconfig = str(write_kubeconfig(tmp_path / "kubeconfig", fake.url))
        yield fake
        server.shutdown()
        thread.join()


def write_kubeconfig(path: Path, server: str) -> Path:
    """A kubeconfig whose context ``lab`` has the namespace lab and whose context ``other`` has none."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "lab",
        "clusters": [{"name": "fake", "cluster": {"server": server}}],
        "users": [{"name": "me", "user": {"token": "very-secret"}}],
        "contexts": [
            {
                "name": "lab",
                "context": {"cluster": "fake", "user": "me", "namespace": "lab"},
            },
            {"name": "other", "context": {"cluster": "fake", "user": "me"}},
        ],
    }
    path.write_text(json.dumps(config))
    return path


@pytest.fixture
def make_run() -> Callable[..., dict[str, Any]]:
    """Return a raw TrainingRun during its training; keywords replace parts of its status, and ``spec`` its
    spec."""

    def make(
        name: str = "docs-lm", *, spec: dict[str, Any] | None = None, **status: Any
    ) -> dict[str, Any]:
        whole: dict[str, Any] = {
            "observedGeneration": 1,
            "phase": "Running",
            "reason": "Training",
            "message": "",
            "image": "localhost/evergrad-trainer:dev",
            "startTime": "2026-03-01T12:00:00Z",
            "nodes": {"summary": "3/4", "min": 2, "max": 4, "ready": 3, "running": 3},
            "progress": {
                "step": 1200,
                "totalSteps": 20000,
                "summary": "1200/20000",
                "percent": 6,
                "loss": "2.413",
                "tokensPerSecond": "41.2k",
                "eta": "5h12m",
                "etaSeconds": 18720,
                "updatedAt": "2026-03-01T12:59:55Z",
            },
            "checkpoint": {"step": 1100},
            "restarts": {"total": 2, "byCause": {"Preempted": 2}},
            "failures": {"withoutProgress": 0},
            "conditions": [
                condition("Complete", "False"),
                condition("Failed", "False"),
                condition("Progressing", "True"),
            ],
        }
        metadata = {
            "name": name,
            "namespace": "lab",
            "uid": f"uid-of-{name}",
            "generation": 1,
        }
        return {
            "apiVersion": "evergrad.dev/v1alpha1",
            "kind": "TrainingRun",
            "metadata": {
                **metadata,
                "creationTimestamp": "2026-03-01T12:00:00Z",
                "resourceVersion": "7",
            },
            "spec": spec
            if spec is not None
            else {"nodes": {"min": 2, "max": 4}, "training": {}},
            "status": {**whole, **status},
        }

    return make


def condition(
    kind: str, status: str, reason: str = "Accepted", message: str = ""
) -> dict[str, Any]:
    return {
        "type": kind,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": "2026-03-01T12:10:00Z",
    }
