"""``evergrad node`` as the first process of a pod: no other process writes the run directory."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_processes import Coordinator
from pages import make_environment, play, read_blocks
from patience import PATIENCE
from run_helpers import metric_rows, recipe

EVERGRAD = Path(sys.executable).with_name("evergrad")
SCRIPT = """\
import os, pathlib
pathlib.Path("wrote-" + os.environ["RANK"]).write_text(os.getcwd() + " " + os.environ["EVERGRAD_STOP_SECONDS"])
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``evergrad node`` with the manifest of a script; ended with the test."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/run.json").write_text(
        json.dumps(
            {
                "apiVersion": "evergrad.dev/v1alpha1",
                "kind": "TrainingRun",
                "metadata": {"name": "r"},
                "spec": {
                    "nodes": {"min": 1, "max": 2},
                    "script": {"command": ["write.py"], "gracePeriodSeconds": 60},
                },
            }
        )
    )
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [
            str(EVERGRAD),
            "node",
            str(tmp_path / "config/run.json"),
            "--run-directory",
            str(tmp_path / "run"),
            *arguments,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        started.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield start
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
        one.communicate()


@pytest.mark.timeout(1800)
def test_nodes_of_a_script_write_its_run_directory_and_do_not_start_a_complete_run(
    node: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/write.py").write_text(SCRIPT)
    coordinator = Coordinator(
        tmp_path, "--recovery", "fresh", "--linger", "3", least=1, most=2
    )
    try:
        join = (
            "--join",
            f"127.0.0.1:{coordinator.wait_until_listening().port}",
            "--address",
            "127.0.0.1",
            "--token-file",
            str(tmp_path / "token"),
        )
        nodes = [
            node(
                *join,
                "--node",
                str(index),
                "--base-directory",
                str(tmp_path / "run"),
                "--workers",
                "1",
            )
            for index in (0, 1)
        ]
        for one in nodes:
            out, _ = one.communicate(timeout=PATIENCE)
            assert one.returncode == 0, out
            assert "] generation 1: ranks " in out, "what its supervisor says"
    finally:
        coordinator.end()
    assert {(tmp_path / f"run/wrote-{rank}").read_text() for rank in (0, 1)} == {
        f"{tmp_path / 'run'} 59"
    }
    assert json.loads((tmp_path / "run/run.json").read_text())["baseDirectory"] == "."
    assert json.loads((tmp_path / "run/complete.json").read_text())["run"] == "r"
    # No server responds at this address, and none needs to be asked.
    late = node(
        "--token-file",
        str(tmp_path / "token"),
        "--join",
        "127.0.0.1:9",
        "--address",
        "127.0.0.1",
        "--node",
        "0",
    )
    out, _ = late.communicate(timeout=PATIENCE)
    assert (late.returncode, "is complete" in out) == (0, True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_node_is_added_by_hand_as_on_the_page_on_elastic_runs(
    experiment: Any, tmp_path: Path
) -> None:
    experiment.write(recipe(horizon={"steps": 2}))
    (experiment.path / "tiny.yaml").rename(experiment.path / "trainingrun.yaml")
    _, block = read_blocks("docs/train/elastic.md")
    coordinator = Coordinator(tmp_path, "--start-wait", "0.1", run="tiny", most=1)
    try:
        address = f"127.0.0.1:{coordinator.wait_until_listening().port}"
        command = block.replace("HOST:PORT", address).replace(
            "FILE", str(tmp_path / "token")
        )
        environment = make_environment(GLOO_SOCKET_IFNAME="lo")
        play(command, experiment.path, environment=environment)
    finally:
        coordinator.end()
    rows = metric_rows(experiment.path / "runs/docs-lm")
    assert [row["step"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    "method", [pytest.param(one, marks=pytest.mark.long) for one in ("spawn", "forkserver")]
)
def test_workers_that_are_not_forked_train_and_their_output_is_the_output_of_the_node(
    method: str, experiment: Any, tmp_path: Path
) -> None:
    experiment.write(recipe(horizon={"steps": 2}))
    coordinator = Coordinator(tmp_path, "--start-wait", "0.1", run="tiny", most=1)
    command = [
        str(EVERGRAD),
        "node",
        "tiny.yaml",
        "--run-directory",
        "run",
        "--start-method",
        method,
        "--workers",
        "1",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        join = [
            "--token-file",
            str(tmp_path / "token"),
            "--join",
            f"127.0.0.1:{coordinator.wait_until_listening().port}",
            "--address",
            "127.0.0.1",
            "--node",
            "0",
        ]
        done = subprocess.run(
            [*command, *join],
            env=environment,
            cwd=experiment.path,
            capture_output=True,
            text=True,
            timeout=1500,  # a busy machine imports torch for minutes
            check=False,
        )
    finally:
        coordinator.end()
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["step"] for row in metric_rows(experiment.path / "run")] == [1, 2]
    assert "step 2/2" in (experiment.path / "run/logs/node-0-worker-0.out").read_text()
    assert "[node 0 rank 0] step 2/2" in done.stderr, "its output is the node's"
