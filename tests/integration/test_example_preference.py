"""The walk through examples/preference: its commands do what its words say."""

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
def test_the_walk_of_preferences_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    readme = (ROOT / "examples/preference/README.md").read_text("utf-8")
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
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/brief/evaluation.jsonl").read_text("utf-8").splitlines()
    ]
    # Short answers are preferred, to words that the run has not seen.
    assert rows[0]["metrics"]["margin"] == 0.0
    assert rows[-1]["metrics"]["accuracy"] >= 0.9
