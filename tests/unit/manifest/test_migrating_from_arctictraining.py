"""The page for users of ArcticTraining: fields that it names exist, and the converted file has the same
meaning."""

import re
from pathlib import Path

import yaml

from evergrad_manifest.derive import slots_per_step
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.model.fields import find_field
from evergrad_manifest.reading.loader import load_manifest

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/migrating/arctictraining.md"


def test_each_field_that_replaces_an_option_of_arctictraining_exists() -> None:
    rows = re.findall(r"^\| `.*?\| (.*?) \|", PAGE.read_text("utf-8"), re.MULTILINE)
    fields = [name for cell in rows for name in re.findall(r"`([^`]+)`", cell)]
    assert len(fields) > 40
    for name in fields:
        full = name if name.startswith("spec.") else f"spec.training.{name}"
        path = tuple(part for part in re.split(r"\.|\[\]", full) if part)
        assert find_field(TrainingRun, path) is not None, name


def test_a_file_of_arctictraining_and_its_conversion_are_equivalent(
    tmp_path: Path,
) -> None:
    theirs_text, ours_text = re.findall(
        r"^```yaml\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "converted.yaml"
    path.write_text(ours_text, "utf-8")
    run = load_manifest(path).run
    theirs, ours = yaml.safe_load(theirs_text), run.training
    pairs, accumulation = theirs["micro_batch_size"], theirs["gradient_accumulation_steps"]
    assert ours.batching.micro_batch_size == pairs
    assert slots_per_step(ours.batching) == accumulation * (run.spec.workers_per_node or 1)
    assert ours.evaluation is not None and ours.evaluation.every is not None
    assert ours.evaluation.every.steps == theirs["eval_interval"]
    assert ours.checkpoint.every.steps == theirs["checkpoint"][0]["save_every_n_steps"]
    assert ours.data.sequence_length == theirs["data"]["max_length"]
    assert ours.data.held_out is not None
    assert ours.data.held_out.fraction == theirs["data"]["train_eval_split"][1]
    assert ours.horizon.epochs == theirs["epochs"]
    assert ours.optimizer.learning_rate == float(theirs["optimizer"]["learning_rate"])
    pair = ours.pair_settings
    assert pair is not None
    assert (pair.beta, pair.label_smoothing) == (theirs["beta"], theirs["label_smoothing"])
    assert ours.model.path == theirs["model"]["name_or_path"]
    # The initial weights of the run.
    assert pair.reference is None and theirs["ref_model"] == theirs["model"]
