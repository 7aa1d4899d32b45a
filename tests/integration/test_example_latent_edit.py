"""The walk through examples/latent-edit: its commands do what its words say."""

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
def test_the_walk_of_edits_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    readme = (ROOT / "examples/latent-edit/README.md").read_text("utf-8")
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
    assert "placed/train.jsonl: has " in done.stdout, "another corpus was refused"

    def rows(run: str, name: str) -> list[dict[str, object]]:
        text = (tmp_path / "runs" / run / name).read_text("utf-8")
        return [json.loads(line) for line in text.splitlines()]

    # The same bits, with states that are kept and with states that are made in each step.
    kept = {row["step"]: row["loss"] for row in rows("latent-edit", "metrics.jsonl")}
    live = {row["step"]: row["loss"] for row in rows("live", "metrics.jsonl")}
    assert len(live) == 20 and all(kept[step] == loss for step, loss in live.items())
    evaluations = [
        json.loads(json.dumps(row["metrics"])) | {"loss": row["loss"]}
        for row in rows("latent-edit", "evaluation.jsonl")
    ]
    first, last = evaluations[0], evaluations[-1]
    assert abs(first["gain"]) < 1e-4
    assert last["loss"] < last["unchanged_loss"] < last["mean_loss"]
