"""The walk through examples/preference: its commands have the described results."""

import json
import shutil
from pathlib import Path

import pytest
from pages import ROOT, SECONDS, play, read_blocks


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 20)
def test_the_walkthrough_of_preferences_runs_as_written(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    printed = play("\n".join(read_blocks("examples/preference/README.md")), tmp_path)
    assert "losses equal bit by bit" in printed
    rows = [
        json.loads(line)
        for line in (tmp_path / "runs/brief/evaluation.jsonl")
        .read_text("utf-8")
        .splitlines()
    ]
    # Short answers are preferred for words that the run has not seen.
    assert rows[0]["metrics"]["margin"] == 0.0
    assert rows[-1]["metrics"]["accuracy"] >= 0.9
