"""``evergrad stacks`` for a run directory, and for the pods of a run."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evergrad_cli.cluster.client.api_client import KubernetesCluster
from evergrad_cli.main import main
from evergrad_coordinator.edge.training_process import (
    describe_self,
    locked_record,
    write_owner,
)

RUNS = "/apis/evergrad.dev/v1alpha1/namespaces/lab/trainingruns"
PODS = "/api/v1/namespaces/lab/pods"
PROGRAM = """
import sys
from evergrad_coordinator.edge.stacks import register_stacks

def work():
    print("here", flush=True)
    input()

register_stacks("rank 0")
work()
"""


def test_a_local_run_is_found_by_its_directory_or_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "docs-lm"
    directory.mkdir(parents=True)
    owner = describe_self()
    assert owner is not None
    with locked_record(directory, create=True) as file:
        write_owner(file, owner)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()
        for name in ("runs/docs-lm", "docs-lm", str(directory)):
            assert main(["stacks", name]) == 0
            shown = capsys.readouterr().out
            assert "==> rank 0, " in shown and "in work" in shown
        assert main(["stacks", "docs-lm", "--json"]) == 0
        # This process may be listed too: another test may have registered it.
        labels = {one["pid"]: one["label"] for one in json.loads(capsys.readouterr().out)}
        assert labels[process.pid] == "rank 0"
    finally:
        process.communicate(b"\n")
    # The command has ended: its number may belong to another process now.
    with locked_record(directory) as file:
        os.ftruncate(file, 0)
    assert main(["stacks", "docs-lm"]) == 64
    assert "no process of a run was found" in capsys.readouterr().err


def test_stacks_are_requested_from_one_pod_after_another(
    api: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, tuple[str, ...]]] = []

    def execute(self: Any, name: str, container: str, command: Sequence[str]) -> str:
        asked.append((name, tuple(command)))
        return json.dumps([{"pid": 1, "process": "p", "label": "", "stacks": f"of {name}"}])

    monkeypatch.setattr(KubernetesCluster, "execute", execute)
    run = {
        "metadata": {"name": "docs-lm", "namespace": "lab"},
        "status": {"phase": "Running"},
    }
    api.on("GET", f"{RUNS}/docs-lm", run)
    api.on("GET", PODS, {"metadata": {}, "items": [pod(0), pod(1)]})
    assert call_stacks(api, "docs-lm") == 0
    assert capsys.readouterr().out == "[node 0] of docs-lm-0-0\n[node 1] of docs-lm-1-0\n"
    assert call_stacks(api, "docs-lm", "--node", "1", "--native") == 0
    command = ("evergrad", "stacks", "--here", "--json")
    assert asked[0] == ("docs-lm-0-0", command)
    assert asked[2] == ("docs-lm-1-0", (*command, "--native"))
    api.on("GET", PODS, {"items": []})
    assert call_stacks(api, "docs-lm") == 64
    assert "has no pod that runs" in capsys.readouterr().err


def pod(index: int) -> dict[str, Any]:
    """The pod of a running node."""
    labels = {
        "evergrad.dev/role": "node",
        "evergrad.dev/attempt": "0",
        "evergrad.dev/index": str(index),
    }
    started = {"name": "trainer", "state": {"running": {"x": 1}}, "restartCount": 0}
    return {
        "metadata": {"name": f"docs-lm-{index}-0", "labels": labels},
        "spec": {"containers": [{"name": "trainer"}]},
        "status": {"phase": "Running", "containerStatuses": [started]},
    }


def call_stacks(api: Any, *arguments: str) -> int:
    """Run ``evergrad stacks`` with the fake API server."""
    return main(["stacks", *arguments, "--kubeconfig", api.kubeconfig, "-n", "lab"])


def test_a_name_or_here_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stacks"]) == 64
    assert main(["stacks", "docs-lm", "--here"]) == 64
    assert capsys.readouterr().err.count("Give one of the two") == 2
