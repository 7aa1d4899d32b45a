"""Runs operators as processes, and a fake API server in a thread of the test process."""

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from patience import PATIENCE

from fake_kubernetes.recipe import TRAINING
from fake_kubernetes.server import FakeServer
from fake_kubernetes.store import Store

T = TypeVar("T")
SPEC = {"nodes": {"min": 1, "max": 2}, "training": TRAINING}


class ServerThread:
    """Runs a FakeServer's event loop in a thread. ``do`` runs a function in that thread."""

    def __init__(self) -> None:
        self.server = FakeServer(Store())
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="fake API server"
        )

    def __enter__(self) -> "ServerThread":
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.server.listen(), self.loop).result(100)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result(100)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE)
        self.loop.close()

    def go_away(self) -> None:
        """Refuse connections until ``come_back``."""
        asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(100)

    def come_back(self) -> None:
        """Serve again at the same address."""
        port = int(self.server.url.rpartition(":")[2])
        asyncio.run_coroutine_threadsafe(self.server.listen(port), self.loop).result(100)

    async def _close(self) -> None:
        await self.server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def do(self, act: Callable[[Store], T]) -> T:
        """Run ``act`` with the store in the server's thread, and return its result."""
        done: Future[T] = Future()

        def run() -> None:
            try:
                done.set_result(act(self.server.store))
            except Exception as error:  # noqa: BLE001
                done.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return done.result(100)

    def create_run(self, name: str, **spec: Any) -> None:
        body = {"metadata": {"name": name, "namespace": "ns"}, "spec": {**SPEC, **spec}}
        self.do(lambda store: store.create("trainingruns", body))

    def pods(self) -> list[str]:
        return self.do(
            lambda store: [raw["metadata"]["name"] for raw in store.list("pods")]
        )

    def status(self, name: str) -> dict[str, Any]:
        return self.do(
            lambda store: dict(store.get("trainingruns", "ns", name).get("status") or {})
        )


class OperatorProcess:
    """A process ``python -m evergrad_operator`` that uses a given server."""

    def __init__(
        self,
        folder: Path,
        url: str,
        *arguments: str,
        token: str = "t",
        environ: dict[str, str] | None = None,
    ) -> None:
        self.log = folder / f"operator-{time.monotonic_ns()}.log"
        kubeconfig = folder / f"{token}.kubeconfig"
        content = {
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": token}}],
        }
        kubeconfig.write_text(json.dumps(content))
        options = [
            "--namespace",
            "ns",
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--trainer-image",
            "t:1",
            "--operator-image",
            "o:1",
        ]
        options += ["--no-network-policies", "--no-disruption-budgets"]
        options += [] if "--lease" in arguments else ["--no-lease"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "evergrad_operator", *options, *arguments],
                stderr=log,
                stdout=subprocess.DEVNULL,
                env={**os.environ, **(environ or {}), "KUBECONFIG": str(kubeconfig)},
            )

    def wait_ready(self) -> None:
        """Wait until /readyz reports ready."""
        wait_for(lambda: self.get("/readyz")[0] == 200, f"readiness: {self.text()}")

    def get(self, path: str) -> tuple[int, str]:
        """Return HTTP status and body. The status is 0 if the connection is refused."""
        found = re.search(r"on port (\d+)", self.text())
        if not found:
            return 0, ""
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{found[1]}{path}", timeout=PATIENCE
            ) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def text(self) -> str:
        return self.log.read_text()

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, seconds: float = PATIENCE) -> int:
        """Wait until the process has ended, and return its exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end: {self.text()}") from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait(200)


def wait_for(is_true: Callable[[], bool], what: str, *, seconds: float = PATIENCE) -> None:
    """Wait until the condition is true. Fails after ``seconds``."""
    end = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < end, f"did not come: {what}"
        time.sleep(0.05)


@contextlib.contextmanager
def running(*processes: OperatorProcess) -> Iterator[None]:
    """End all processes with the block."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
