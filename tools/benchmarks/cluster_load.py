"""Posts runs at a fixed rate, and records in another process when their pods exist."""

import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bed.api import Api

THREADS = 16
NODES = 4
RunOf = Callable[[dict[str, str]], str | None]


class LoadError(Exception):
    """The load was not completed; the message says what is missing."""


@dataclass
class Seen:
    """Times at which each pod of each run was first seen, and first seen Running: monotonic clock, in
    seconds."""

    created: dict[str, dict[str, float]] = field(default_factory=dict)
    running: dict[str, dict[str, float]] = field(default_factory=dict)
    others: int = 0
    deleted: int = 0

    def take(
        self,
        kind: str,
        pod: dict[str, Any],
        run_of: RunOf,
        at: float,
    ) -> None:
        """Process one event of a watch."""
        name, run = pod["metadata"]["name"], run_of(pod["metadata"].get("labels") or {})
        self.deleted += kind == "DELETED"
        if run is None:
            self.others += kind == "ADDED"
            return
        if kind == "ADDED":
            self.created.setdefault(run, {}).setdefault(name, at)
        if pod["status"].get("phase") == "Running":
            self.running.setdefault(run, {}).setdefault(name, at)

    def whole(self, times: dict[str, dict[str, float]]) -> dict[str, float]:
        """Return the time at which each run had all its pods, for runs that had them."""
        return {
            run: sorted(pods.values())[NODES - 1]
            for run, pods in times.items()
            if len(pods) >= NODES
        }

    @property
    def extra(self) -> int:
        """Return the number of node pods in excess of four per run."""
        return sum(max(0, len(pods) - NODES) for pods in self.created.values())


class Watcher:
    """Watches the pods of a namespace in a separate process, from before ``start`` returns until
    ``finish``."""

    def __init__(self, kubeconfig: Path, path: str, run_of: RunOf) -> None:
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._ready = context.Value("i", 0)
        self._process = context.Process(
            target=_watch, args=(kubeconfig, path, run_of, self._ready, there), daemon=True
        )
        self._process.start()
        there.close()
        if not self._here.poll(30) or self._here.recv() != "watching":
            raise LoadError("The watch of the pods did not begin.")

    def wait(self, runs: int, *, seconds: float) -> None:
        """Wait until ``runs`` runs have all their pods Running.

        Raises LoadError after ``seconds``, or if the watch breaks.
        """
        deadline = time.monotonic() + seconds
        while self._ready.value < runs:
            if not self._process.is_alive():
                raise LoadError("The watch of the pods broke.")
            if time.monotonic() > deadline:
                raise LoadError(
                    f"{self._ready.value} of {runs} runs have all their pods after {seconds:.0f} s."
                )
            time.sleep(0.1)

    def finish(self) -> Seen:
        """Return everything that was seen, after the process has ended."""
        try:
            self._here.send("finish")
            if not self._here.poll(60):
                raise LoadError("The watch of the pods does not end.")
            seen: Seen = self._here.recv()
            return seen
        finally:
            self.close()

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.join()
        self._here.close()


def _watch(
    kubeconfig: Path,
    path: str,
    run_of: RunOf,
    ready: Any,
    parent: Connection,
) -> None:
    api, seen, lock = _Api(kubeconfig), Seen(), threading.Lock()
    version = api.get(f"{path}?limit=1")["metadata"]["resourceVersion"]
    events = api.events(path, version)
    complete: set[str] = set()

    def read() -> None:
        for line in events:
            now = time.monotonic()
            event = json.loads(line)
            with lock:
                seen.take(event["type"], event["object"], run_of, now)
                run = run_of(event["object"]["metadata"].get("labels") or {})
                if (
                    run is not None
                    and run not in complete
                    and len(seen.running.get(run, ())) >= NODES
                ):
                    complete.add(run)
                    ready.value = len(complete)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    parent.send("watching")
    while not parent.poll(0.5):
        if not reader.is_alive():
            return
    with lock:
        parent.send(seen)


class _Api(Api):
    """The bed's client with one connection for many requests, and a watch that ends when it breaks."""

    def events(self, path: str, version: str) -> Any:
        """Return the lines of a watch, which has begun when this returns."""
        connection = self._connection(3600)
        query = f"watch=1&resourceVersion={version}&timeoutSeconds=3600"
        connection.request("GET", f"{path}?{query}", headers=self._headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            raise LoadError(f"watch: {answer.status} {answer.read()[:300]!r}")
        return iter(answer.readline, b"")

    def open(self) -> http.client.HTTPSConnection:
        """Return a persistent connection."""
        connection = self._connection(60)
        connection.connect()
        return connection

    def post(
        self,
        connection: http.client.HTTPSConnection,
        path: str,
        body: bytes,
    ) -> None:
        """Post one object. Raises LoadError if it is refused."""
        connection.request(
            "POST",
            path,
            body,
            headers={**self._headers, "Content-Type": "application/json"},
        )
        answer = connection.getresponse()
        text = answer.read()
        if answer.status != http.client.CREATED:
            raise LoadError(
                f"POST {path}: {answer.status} {text[:500].decode(errors='replace')}"
            )


@dataclass
class Posted:
    """Times at which each run was sent, and durations of the POSTs, in seconds."""

    at: dict[str, float] = field(default_factory=dict)
    took: list[float] = field(default_factory=list)


def post(
    kubeconfig: Path, path: str, bodies: Sequence[dict[str, Any]], *, rate: float
) -> Posted:
    """Post all objects at ``rate`` per second from 16 threads, each with its own connection.

    Raises LoadError if one is refused.
    """
    api = _Api(kubeconfig)
    encoded = [(body["metadata"]["name"], json.dumps(body).encode()) for body in bodies]
    posted, errors, lock = Posted(), list[Exception](), threading.Lock()
    numbers = iter(range(len(encoded)))
    connections = [api.open() for _ in range(min(THREADS, len(encoded)))]
    begun = time.monotonic() + 0.2

    def work(connection: http.client.HTTPSConnection) -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            time.sleep(max(0.0, begun + number / rate - time.monotonic()))
            name, body = encoded[number]
            start = time.monotonic()
            try:
                api.post(connection, path, body)
            except (LoadError, OSError, http.client.HTTPException) as error:
                errors.append(error)
                return
            with lock:
                posted.at[name] = start
                posted.took.append(time.monotonic() - start)

    threads = [
        threading.Thread(target=work, args=(connection,)) for connection in connections
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in connections:
        connection.close()
    if errors:
        raise LoadError(str(errors[0])) from errors[0]
    return posted


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]
