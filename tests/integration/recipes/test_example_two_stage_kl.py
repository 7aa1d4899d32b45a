"""The walk through examples/two-stage-kl: its commands have the described results."""

import json
import shutil
from pathlib import Path

import pytest
from pages import ROOT, SECONDS, play, read_blocks


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_two_stages_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = play("\n".join(read_blocks("examples/two-stage-kl/README.md")), tmp_path)
    assert "losses equal bit by bit" in printed
    runs = tmp_path / "runs"
    assert (runs / "two-stages/checkpoints/step-157").is_dir()

    # The last losses on prose: with the penalty less of it is forgotten than without.
    last = {
        name: [
            row
            for row in map(
                json.loads,
                (runs / name / "evaluation.jsonl").read_text("utf-8").splitlines(),
            )
            if row["name"] == "stage1"
        ][-1]
        for name in ("two-stages", "without")
    }
    assert last["two-stages"]["metrics"]["kl"] < last["without"]["metrics"]["kl"]
    assert last["two-stages"]["loss"] < last["without"]["loss"]
