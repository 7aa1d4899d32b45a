"""Runs ``evergrad`` on a cluster, opens the page of a run, and forwards ports of pods with kubectl."""

import contextlib
import itertools
import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from cluster_runs import Runs
from patience import PATIENCE

EVERGRAD = Path(sys.executable).with_name("evergrad")


class Cli:
    """``evergrad`` in the namespace of a test."""

    def __init__(self, runs: Runs, folder: Path) -> None:
        self._place = ["--kubeconfig", str(runs.cluster.kubeconfig), "-n", runs.namespace]
        self._folder = folder

    def command(self, name: str, *arguments: str) -> list[str]:
        return [str(EVERGRAD), name, *arguments, *self._place]

    def call(
        self, name: str, *arguments: str, code: int = 0, seconds: float = 600.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command, and check that its exit code is ``code``."""
        command = self.command(name, *arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, check=False
        )
        assert done.returncode == code, (
            f"{name} {arguments}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        assert "Traceback" not in done.stderr
        return done

    def ask(self, name: str, *arguments: str, code: int = 0) -> Any:
        """Run a command, and return its JSON document."""
        return json.loads(self.call(name, *arguments, "--json", code=code).stdout)

    def write(self, manifest: dict[str, Any]) -> str:
        """A manifest as a file; JSON is YAML."""
        path = self._folder / f"{manifest['metadata']['name']}.yaml"
        path.write_text(json.dumps(manifest))
        return str(path)


@dataclass
class Page:
    """The page of a run, opened on this machine."""

    address: str
    token: str
    file: Path
    printed: str
    """The output of the command. It is complete when the command has ended."""

    def read_updates(self, number: int) -> list[dict[str, Any]]:
        """The states that the page shows without an action of the user."""
        asked = urllib.request.Request(
            f"{self.address}live", headers={"Authorization": f"Bearer {self.token}"}
        )
        with urllib.request.urlopen(asked, timeout=PATIENCE) as events:
            return [
                json.loads(line.removeprefix(b"data: "))
                for line in itertools.islice(events, 3 * number)
                if line.startswith(b"data: ")
            ]


@contextlib.contextmanager
def open_page(cli: Cli, run: str) -> Iterator[Page]:
    """The page of a run inside the block, opened by ``evergrad open``. An interrupt ends the command with 0."""
    opening = subprocess.Popen(
        cli.command("open", run, "--no-browser", "--json"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with opening:
        try:
            assert opening.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                line = opening.stdout.readline()
                assert line, opening.communicate()[1]
                text += line
            shown = json.loads(text)
            file = Path(unquote(urlsplit(shown["open"]).path))
            token = unquote(file.read_text().partition("#token=")[2].partition('"')[0])
            page = Page(shown["address"], token, file, text)
            yield page
            opening.send_signal(signal.SIGINT)
            _, errors = opening.communicate(timeout=PATIENCE)
            page.printed += errors
        finally:
            opening.kill()
    assert opening.returncode == 0, errors


@contextlib.contextmanager
def forward_port(cluster: Any, namespace: str, pod: str, port: int) -> Iterator[str]:
    """Forward a port of a pod inside the block, and yield its address on this machine."""
    place = ["--kubeconfig", str(cluster.kubeconfig), "--namespace", namespace]
    forwarding = subprocess.Popen(
        [str(cluster.kubectl), *place, "port-forward", f"pod/{pod}", f":{port}"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with forwarding:
        try:
            assert forwarding.stdout is not None
            found = re.search(r"127\.0\.0\.1:(\d+)", forwarding.stdout.readline())
            assert found is not None
            yield f"http://127.0.0.1:{found[1]}/"
        finally:
            forwarding.kill()
