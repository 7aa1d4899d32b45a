"""Two nodes that connect over IPv6 only: coordinator, stores and addresses use ``::1``."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from coordinator_processes import Coordinator, wait_for
from patience import PATIENCE
from run_helpers import metric_rows, recipe

EVERGRAD = Path(sys.executable).with_name("evergrad")


def has_ipv6_loopback() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    not has_ipv6_loopback(), reason="this machine has no IPv6 loopback address"
)
def test_two_nodes_train_over_ipv6(experiment: Any, tmp_path: Path) -> None:
    experiment.write(recipe(horizon={"steps": 4}), nodes={"min": 2, "max": 2})
    coordinator = Coordinator(tmp_path, run="tiny", least=2, most=2, host="::1")
    # gloo uses the addresses of this interface, and itself selects IPv6. Without a host name, no look-up is
    # needed.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    nodes: list[subprocess.Popen[str]] = []
    try:
        port = coordinator.wait_until_listening().port
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", port), timeout=PATIENCE).close()
        for index in (0, 1):
            arguments = [
                *("--join", f"[::1]:{port}", "--address", "::1", "--node", str(index)),
                *("--token-file", str(tmp_path / "token"), "--workers", "1"),
                *("--run-directory", "run"),
            ]
            nodes.append(
                subprocess.Popen(
                    [str(EVERGRAD), "node", "tiny.yaml", *arguments],
                    env=environment,
                    cwd=experiment.path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        wait_for(
            lambda: (
                [one["address"] for one in coordinator.status()["nodes"].get("members", [])]
                == ["::1", "::1"]
            ),
            "both nodes at their addresses",
        )
        said = [node.communicate(timeout=800)[0] for node in nodes]
        assert [node.returncode for node in nodes] == [0, 0], "\n".join(said)
    finally:
        for node in nodes:
            if node.poll() is None:
                node.kill()
                node.communicate()
        coordinator.end()
    rows = metric_rows(experiment.path / "run")
    assert [(row["step"], row["world_size"]) for row in rows] == [
        (step, 2) for step in range(1, 5)
    ]
