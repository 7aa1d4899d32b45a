"""Pages for users of other trainers: options have a line, fields that they name exist, and converted files
have the same meaning."""

import csv
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.model.fields import find_field
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.training import Training
from evergrad_manifest.training.latent_edit import published_mixture

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs/reference/migrating"
PAGES = ("chemlactica", "genolewm", "optimus-dl", "theseus")


OPTIONS = {
    "arctictraining": ("A", 1, 37),
    "chemlactica": ("C", 1, 30),
    "genolewm": ("G", 2, 11),
    "optimus-dl": ("O", 8, 27),
    "theseus": ("T", 20, 37),
}
"""Return the rows of tests/evidence/capabilities.csv that are options of each system."""


def options_of(page: str) -> dict[str, str]:
    """Return the last parts of the names of a system's options, each with the id of its row."""
    letter, first, last = OPTIONS[page]
    ids = {f"{letter}-{number}" for number in range(first, last + 1)}
    found = {}
    with (ROOT / "tests/evidence/capabilities.csv").open(
        encoding="utf-8", newline=""
    ) as file:
        for row in csv.DictReader(file):
            if row["id"] in ids:
                # theseus has a path after the name, and its file contains the last part of the path.
                path = re.search(r"\(([\w/]+)\)", row["capability"])
                names = path[1] if path else re.sub(r" \(.*\)", "", row["capability"])
                for name in names.split(", "):
                    found[re.split(r"[./]", name)[-1]] = row["id"]
    assert len(set(found.values())) == len(ids)
    return found


@pytest.mark.parametrize("page", OPTIONS)
def test_each_option_of_a_system_has_a_line_on_its_page(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text("utf-8")
    cells = re.findall(r"^\| (.*?) \|", text, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"\w+", cell)}
    missing = {name: row for name, row in options_of(page).items() if name not in named}
    assert missing == {}


def read(name: str, folder: Path) -> tuple[dict[str, Any], Training]:
    """Return the first example of a page, and the example that it was converted to."""
    text = (FOLDER / f"{name}.md").read_text("utf-8")
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    path = folder / "converted.yaml"
    path.write_text(ours, "utf-8")
    return yaml.safe_load(theirs), load_manifest(path).run.training


@pytest.mark.parametrize("page", PAGES)
def test_each_field_that_replaces_an_option_exists(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text("utf-8")
    cells = re.findall(r"^\| `.*?\| (.*?) \|", text, re.MULTILINE)
    fields = [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(fields) > 20
    for name in fields:
        full = name if name.startswith(("spec.", "metadata.")) else f"spec.training.{name}"
        path = tuple(part for part in re.split(r"\.|\[\]", full) if part)
        assert find_field(TrainingRun, path) is not None, name


@pytest.mark.capability("C-49", "C-50")
def test_a_file_of_chemlactica_and_its_conversion_are_equivalent(tmp_path: Path) -> None:
    theirs, ours = read("chemlactica", tmp_path)
    overlay = theirs["train_config"]
    assert ours.optimizer.learning_rate == float(overlay["max_learning_rate"])
    assert ours.schedule.warmup == overlay["warmup_steps"]
    assert ours.data.sequence_length == theirs["model_config"]["block_size"]
    # The horizon of the schedule and the stop are two numbers.
    assert (ours.horizon.steps, ours.stop.after_step) == (120_000, 40_000)
    assert ours.batching.global_batch_size == 16 * 8 * 4
    # The defaults of the other program.
    assert ours.optimizer.betas == (0.9, 0.95)
    assert (ours.optimizer.weight_decay, ours.optimizer.clip_norm) == (0.1, 1)
    assert (ours.checkpoint.keep, ours.runtime.matmul_precision) == (4, "high")
    assert ours.tokenizer.path == theirs["model_config"]["tokenizer_path"]


def test_a_file_of_optimus_dl_and_its_conversion_are_equivalent(tmp_path: Path) -> None:
    theirs, ours = read("optimus-dl", tmp_path)
    common, optimization = theirs["common"], theirs["optimization"]
    assert ours.horizon.steps == optimization["iterations"]
    assert ours.optimizer.clip_norm == optimization["clip_grad_norm"]
    assert ours.optimizer.learning_rate == float(optimization["optimizer"]["lr"])
    assert ours.checkpoint.every.steps == common["save_freq"]
    assert ours.evaluation.every is not None
    assert ours.evaluation.every.steps == common["eval_freq"]
    assert ours.logging.every.steps == common["log_freq"]
    assert ours.reproducibility.seed == common["seed"]
    iterations = theirs["data"]["eval_datasets"]["val"]["eval_iterations"]
    assert ours.evaluation.sets[0].samples == iterations * 16 * 2
    assert ours.batching.global_batch_size == 16 * optimization["acc_steps"] * 2


def test_a_file_of_theseus_and_its_conversion_are_equivalent(tmp_path: Path) -> None:
    theirs, ours = read("theseus", tmp_path)
    training, logging = theirs["training"], theirs["logging"]
    assert ours.batching.global_batch_size == training["batch_size"]
    assert ours.batching.micro_batch_size == training["per_device_batch_size"]
    assert ours.horizon.tokens == sum(training["tokens"])
    assert ours.two_stage_kl is not None
    first, second = ours.two_stage_kl.stages
    assert first.tokens == training["tokens"][0]
    for stage, mixture in zip((first, second), training["dataset"], strict=True):
        assert stage.mixture == {one["name"]: one["rate"] for one in mixture}
    assert second.beta == theirs["optimization"]["kl"]["beta"]
    assert ours.two_stage_kl.estimator == "nll_difference"
    assert ours.evaluation.samples == training["validation_steps"]
    assert ours.evaluation.every is not None
    assert ours.evaluation.every.steps == logging["validation_interval"]
    assert ours.checkpoint.every.steps == logging["checkpoint_interval"]
    assert ours.logging.every.steps == logging["report_interval"]
    assert ours.data.sequence_length == theirs["architecture"]["block_size"]


@pytest.mark.capability("G-X6", "G-X7", "G-X9")
def test_a_file_of_genolewm_and_its_conversion_are_equivalent(tmp_path: Path) -> None:
    theirs, ours = read("genolewm", tmp_path)
    encoder, optimizer, steps = (
        theirs["encoder"],
        theirs["optimizer"],
        theirs["training"]["max_steps"],
    )
    edits = ours.latent_edit
    assert edits is not None
    assert edits.encoder.layer == encoder["state_layer"]
    assert edits.encoder.radius == encoder["pool_radius"]
    assert (edits.encoder.normalize, edits.encoder.dtype) == (
        encoder["normalize"],
        encoder["dtype"],
    )
    predictor = {"layers": 6, "heads": 8, "d_action": 64}
    assert theirs["predictor"] == predictor
    assert (edits.predictor.layers, edits.predictor.heads) == (6, 8)
    assert edits.predictor.action_width == predictor["d_action"]
    assert tuple(edits.mixture) == published_mixture()
    assert ours.batching.global_batch_size == theirs["data"]["batch_size"]
    assert ours.optimizer.learning_rate == float(optimizer["lr"])
    assert list(ours.optimizer.betas) == optimizer["betas"]
    assert ours.optimizer.clip_norm == optimizer["clip"]
    assert (ours.horizon.steps, ours.schedule.warmup) == (steps, optimizer["warmup"])
    # Their wsd: constant for 80 % of the steps after the warm-up, a tenth at 98 %, and a hundredth at the
    # end.
    behind = steps - optimizer["warmup"]
    assert [(piece.until, piece.ratio) for piece in ours.schedule.pieces] == [
        (optimizer["warmup"] + behind * 80 // 100, 1),
        (optimizer["warmup"] + behind * 98 // 100, 0.1),
        (steps, 0.01),
    ]
    assert ours.reproducibility.seed == theirs["seed"]
    assert ours.reproducibility.deterministic == theirs["deterministic"]
    assert [one.policy for one in ours.monitors] == ["warn", "warn"]
