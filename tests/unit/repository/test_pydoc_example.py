"""The example's documents are always the same, and its manifest is one."""

import json
import subprocess
import sys
from pathlib import Path

import yaml

from evergrad_manifest.envelope import TrainingRun


def write_documents(root: Path, path: Path) -> str:
    script = root / "examples" / "pydoc" / "make_documents.py"
    return subprocess.run(
        [sys.executable, str(script), str(path)], check=True, capture_output=True, text=True
    ).stdout


def test_the_documents_have_one_topic_per_line_in_a_fixed_order(
    root: Path, tmp_path: Path
) -> None:
    said = write_documents(root, tmp_path / "documents.jsonl")
    rows = [
        json.loads(line)
        for line in (tmp_path / "documents.jsonl").read_text("utf-8").splitlines()
    ]
    topics = [row["topic"] for row in rows]
    assert topics == sorted(set(topics))
    assert len(topics) > 70
    assert all(set(row) == {"topic", "text"} and row["text"].strip() for row in rows)
    assert f"{len(topics)} documents" in said


def test_writing_the_documents_twice_gives_the_same_bytes_and_no_other_file(
    root: Path, tmp_path: Path
) -> None:
    write_documents(root, tmp_path / "a.jsonl")
    write_documents(root, tmp_path / "b.jsonl")
    assert (tmp_path / "a.jsonl").read_bytes() == (tmp_path / "b.jsonl").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]


def test_the_manifest_of_the_example_is_valid_and_evaluates_at_each_save(
    root: Path,
) -> None:
    document = yaml.safe_load(
        (root / "examples" / "pydoc" / "trainingrun.yaml").read_text()
    )
    training = TrainingRun.model_validate(document).spec.training
    assert training.checkpoint.best is not None
    assert training.checkpoint.best.metric == "heldOut/loss"
    assert training.evaluation.every is not None
    assert training.evaluation.every.steps == training.checkpoint.every.steps
