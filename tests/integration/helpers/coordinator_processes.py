"""Runs a real coordinator process, and nodes on real sockets."""

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from patience import PATIENCE

from evergrad_common.addresses import join_address
from evergrad_common.codec import encode
from evergrad_coordinator.edge.client import CoordinatorClient
from evergrad_coordinator.protocol import (
    Broken,
    End,
    Go,
    Hello,
    Leave,
    Leaving,
    Left,
    Message,
    Placement,
    Plan,
    Progress,
    Ready,
    Refused,
    Up,
)

TOKEN = "the token of a test"
"""Long enough for a busy machine; nothing here takes a second on an idle one."""


class Coordinator:
    """One coordinator process, which its test starts and ends."""

    def __init__(
        self,
        folder: Path,
        *arguments: str,
        run: str = "r",
        least: int = 1,
        most: int = 3,
        host: str = "127.0.0.1",
    ) -> None:
        self.folder = folder
        self._host = host
        self._address = folder / f"address-{time.monotonic_ns()}.json"
        self._log = self._address.with_suffix(".log")
        command = [
            sys.executable,
            "-m",
            "evergrad_coordinator",
            "--run",
            run,
            "--min",
            str(least),
            "--max",
            str(most),
        ]
        command += [
            "--host",
            host,
            "--address-file",
            str(self._address),
            "--linger",
            "0",
        ]
        command += ["--token-file", str(folder / "token"), *arguments]
        (folder / "token").write_text(TOKEN)
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stderr=log, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL
            )

    def wait_until_listening(self) -> "Coordinator":
        wait_for(
            lambda: self._address.exists() or self.process.poll() is not None,
            "the address file",
        )
        assert self._address.exists(), self.log_text()
        return self

    @property
    def address(self) -> dict[str, int]:
        found: dict[str, int] = json.loads(self._address.read_text())
        return found

    @property
    def port(self) -> int:
        return self.address["port"]

    def log_text(self) -> str:
        return self._log.read_text()

    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log_text().splitlines()]

    def get(self, path: str, *, token: str | None = TOKEN) -> tuple[int, str]:
        return self.post(path, None, token=token)

    def post(
        self, path: str, body: bytes | None, *, token: str | None = TOKEN
    ) -> tuple[int, str]:
        """Send a POST request, or a GET request if there is no body."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        request = urllib.request.Request(
            f"http://{join_address(self._host, self.address['statusPort'])}{path}",
            body,
            headers,
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.get("/status")[1])
        return found

    def metric(self, name: str) -> float:
        lines = self.get("/metrics")[1].splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.split("{")[0].split(" ")[0] == name
        )

    def resident_megabytes(self) -> float:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return (
            next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024
        )

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)


def wait_for(is_so: Callable[[], Any], what: str) -> None:
    """Wait until the condition is true."""
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, f"{what} did not happen"
        time.sleep(0.005)


class Start:
    """A factory of coordinators in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Coordinator] = []

    def __call__(self, *arguments: str, **options: Any) -> Coordinator:
        self.started.append(Coordinator(self.folder, *arguments, **options))
        return self.started[-1]


def run_coordinators(folder: Path) -> Iterator[Start]:
    """Return a factory of coordinators, which end with the test."""
    start = Start(folder)
    try:
        yield start
    finally:
        for one in start.started:
            one.end()


def hello_line(node: str = "0", **changes: Any) -> bytes:
    """Return the first line that a node sends."""
    values: dict[str, Any] = {
        "run": "r", "node": node, "incarnation": f"i{node}", "address": "127.0.0.1", "workers": 1, "recovery": "in-process",
        "token": TOKEN,
    }  # fmt: skip
    return encode(Hello(**{**values, **changes}))


def read_until_closed(connection: socket.socket) -> bytes:
    """Return all data until the other side closes the connection. A reset counts as a close."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := connection.recv(65536):
            found += data
    return found


class Node:
    """A node that answers correctly. ``step`` grows while its group is complete, because no message stops
    it."""

    def __init__(
        self,
        port: int,
        name: str,
        *,
        incarnation: str = "",
        host: str = "127.0.0.1",
        **changes: Any,
    ) -> None:
        self.name = name
        self.received: list[Message] = []
        self.had: Placement | None = None
        self.known = 0
        self.is_leaving = False
        self.exit_code: int | None = None
        self._changes = changes
        self._incarnation = incarnation or f"i{name}"
        self.client = CoordinatorClient(
            host,
            port,
            hello=self._hello,
            on_message=self._take,
            on_connected=self._say_again,
        )
        self.task = asyncio.get_running_loop().create_task(self.client.run())

    def _hello(self) -> Hello:
        values: dict[str, Any] = {
            "run": "r", "node": self.name, "incarnation": self._incarnation, "address": "127.0.0.1", "workers": 1,
            "recovery": "in-process", "had": self.had, "known_generation": self.known, "token": TOKEN,
        }  # fmt: skip
        return Hello(**{**values, **self._changes})

    def _say_again(self) -> None:
        if self.is_leaving:
            self.client.send(Leaving())

    def leave(self) -> None:
        self.is_leaving = True
        self.client.send(Leaving())

    def _take(self, message: Message) -> None:
        self.received.append(message)
        self.known = max(self.known, getattr(message, "generation", 0))
        match message:
            case Plan(generation=generation):
                self.had = None
                self.client.send(Ready(generation, 1, 1, 5))
            case Go():
                self.had = Placement(
                    message.generation,
                    message.first_rank,
                    message.workers,
                    message.world_size,
                )
                self.client.send(Up(message.generation, 5))
            case Leave(generation=generation, save=save):
                self.client.send(Left(generation, is_saved=save))
                self.client.close()
            case End(exit_code=code) | Refused(exit_code=code):
                self.exit_code = code

    def count(self, kind: type[Message]) -> int:
        return sum(isinstance(one, kind) for one in self.received)


async def poll(is_so: Callable[[], Any], what: str) -> None:
    """Wait like ``wait_for``, while the nodes continue to run."""
    until = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < until, f"{what} did not happen"
        await asyncio.sleep(0.005)


async def end_nodes(*nodes: Node) -> None:
    """Close the connections of the nodes."""
    for node in nodes:
        node.client.close()
    await asyncio.gather(*(node.task for node in nodes))


__all__ = ["Broken", "Progress"]
