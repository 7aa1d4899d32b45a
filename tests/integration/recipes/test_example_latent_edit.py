"""The walk through examples/latent-edit: its commands have the described results."""

import json
import shutil
from pathlib import Path

import pytest
from pages import ROOT, SECONDS, play, read_blocks


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_edits_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = play("\n".join(read_blocks("examples/latent-edit/README.md")), tmp_path)
    assert "placed/train.jsonl: has " in printed, "another corpus was refused"

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
