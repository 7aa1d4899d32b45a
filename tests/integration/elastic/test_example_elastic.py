"""The walk through examples/elastic: its commands have the described results."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from pages import ROOT, SECONDS, make_environment, read_blocks


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_elastic_walkthrough_runs_as_written_and_ends_bit_equal(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    manifest = tmp_path / "examples/elastic/trainingrun.yaml"
    # Fewer steps than a reader would want to watch.
    manifest.write_text(
        manifest.read_text("utf-8").replace(
            "horizon: {steps: 120}", "horizon: {steps: 80}"
        ),
        "utf-8",
    )
    # Run one script in a separate session; it stops at the first failure.
    script = "\n".join(["set -e", *read_blocks("examples/elastic/README.md")])
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    finally:
        # The launchers are in the session's first group; their nodes and workers die with them.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output[-8000:]
    assert "losses equal bit by bit" in output
    events = [
        json.loads(line)
        for line in (tmp_path / "runs/elastic/events.jsonl").read_text("utf-8").splitlines()
    ]
    worlds = [event["world_size"] for event in events if event["type"] == "world"]
    assert len(worlds) >= 4, events
    assert min(worlds) <= 2
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/elastic/metrics.jsonl")
        .read_text("utf-8")
        .splitlines()
    ]
    assert [row["step"] for row in rows] == list(range(1, 81)), (
        "no finished step is trained again"
    )
    assert (tmp_path / "runs/chaos/complete.json").is_file()
