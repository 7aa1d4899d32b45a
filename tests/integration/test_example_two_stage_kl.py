"""The walk through examples/two-stage-kl: its commands do what its words say."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walk_of_two_stages_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    readme = (ROOT / "examples/two-stage-kl/README.md").read_text("utf-8")
    script = "set -e\n" + "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    assert "losses equal bit by bit" in done.stdout
    runs = tmp_path / "runs"
    assert (runs / "two-stages/checkpoints/step-157").is_dir()

    # The last losses on prose: with the penalty less of it is forgotten than without.
    last = {
        name: [
            row
            for row in map(
                json.loads, (runs / name / "evaluation.jsonl").read_text("utf-8").splitlines()
            )
            if row["name"] == "stage1"
        ][-1]
        for name in ("two-stages", "without")
    }
    assert last["two-stages"]["metrics"]["kl"] < last["without"]["metrics"]["kl"]
    assert last["two-stages"]["loss"] < last["without"]["loss"]
