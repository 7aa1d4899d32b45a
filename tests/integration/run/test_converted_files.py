"""The converted files of the pages for users of other trainers run: smaller models, shorter samples and local
data, and all else as the page has it. That of ArcticTraining is with the recipe ``preference``."""

import random
import re
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from latent_corpus import ENCODER, write_corpus
from run_helpers import (
    DONE,
    MODEL,
    STOPPED_SAVED,
    Experiment,
    checkpoints,
    curve,
    merge,
    read_lines,
    recipe,
    write_documents,
)

PAGES = Path(__file__).resolve().parents[3] / "docs/reference/migrating"
BYTES = {"tokenizer": {"type": "byte", "path": None}}
ON_THIS_MACHINE = {"runtime": {"precision": "fp32", "device": "cpu", "threads": 1}}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
TWO_STEPS = ("--stop-after-steps", "2")


def write_tokens(path: Path, code: str, *, count: int = 20_000) -> None:
    """A flat file of bytes as ids; ``code``: their type, as in the module array."""
    path.parent.mkdir(parents=True, exist_ok=True)
    source = random.Random(str(path))
    path.write_bytes(array(code, (source.randrange(256) for _ in range(count))).tobytes())


def write_folders(folder: Path) -> None:
    for number, name in enumerate(("computed", "assay", "valid")):
        (folder / "data" / name).mkdir(parents=True)
        write_documents(folder / "data" / name / "a.jsonl", count=300, seed=number)


def write_shards(folder: Path) -> None:
    for name in ("train/a", "train/b", "val"):
        write_tokens(folder / f"data/{name}.bin", "H")


def write_stages(folder: Path) -> None:
    for name in ("toyweb", "toychat"):
        write_tokens(folder / f"data/{name}/train.bin", "I")


@dataclass(frozen=True)
class Converted:
    """The requirements of a page's file to run here, and its number of steps."""

    data: Callable[[Path], Any]
    changes: dict[str, Any]
    arguments: tuple[str, ...] = TWO_STEPS
    steps: int = 2
    metrics: set[str] = field(default_factory=set)


FILES = {
    "chemlactica": Converted(
        write_folders,
        {
            "model": {"path": None, "config": MODEL},
            **BYTES,
            "data": {"sequenceLength": 32},
            # Faster products of an accelerator, which a CPU does not have.
            "runtime": {**ON_THIS_MACHINE["runtime"], "matmulPrecision": None},
        },
    ),
    "genolewm": Converted(
        lambda folder: write_corpus(folder / "corpus"),
        {
            "model": {"path": None, "config": {**ENCODER, "num_hidden_layers": 20}},
            **BYTES,
            "latentEdit": {"margin": 4},
        },
        metrics={
            "prediction_variance",
            "target_variance",
            "pairwise_distance",
            "gaussian_kl",
        },
    ),
    "optimus-dl": Converted(
        write_shards, {"model": {"config": SMALL}, **BYTES, "data": {"sequenceLength": 32}}
    ),
    # Its second stage begins with the second of three steps of 2,048 tokens.
    "theseus": Converted(
        write_stages,
        {
            "model": {"config": {**SMALL, "num_hidden_layers": 1}},
            **BYTES,
            "data": {"sequenceLength": 32},
            "horizon": {"tokens": 3 * 2048},
        },
        arguments=(),
        steps=3,
        metrics={"penalty"},
    ),
}


def test_each_page_has_a_manifest_that_is_run() -> None:
    elsewhere = {"arctictraining"}
    assert FILES.keys() | elsewhere == {path.stem for path in PAGES.glob("*.md")}


@pytest.mark.long
@pytest.mark.parametrize("page", FILES)
def test_the_converted_manifest_of_a_page_runs(experiment: Experiment, page: str) -> None:
    one = FILES[page]
    text = (PAGES / f"{page}.md").read_text("utf-8")
    (ours,) = re.findall(r"^```yaml\n(apiVersion.*?)^```$", text, re.MULTILINE | re.DOTALL)
    training = merge(
        merge(yaml.safe_load(ours)["spec"]["training"], ON_THIS_MACHINE), one.changes
    )
    if page == "theseus":
        training["twoStageKl"]["stages"][0]["tokens"] = 2048
    one.data(experiment.path)
    experiment.write(training)
    experiment.run(*one.arguments, expect=STOPPED_SAVED if one.arguments else DONE)
    rows = curve(experiment.at())
    assert [*rows] == list(range(1, one.steps + 1))
    assert rows[one.steps].get("metrics", {}).keys() >= one.metrics
    assert all(row["loss"] > 0 and row["valid_tokens"] > 0 for row in rows.values())


CHEMLACTICA: dict[str, Any] = {
    "model": {"config": {**MODEL, "attention_dropout": 0.1}},
    "data": {"heldOut": {"count": 6}},
    "optimizer": {
        "type": "adamw",
        "betas": [0.9, 0.95],
        "learningRate": 6e-4,
        "weightDecay": 0.1,
        "clipNorm": 1.0,
    },
    "schedule": {"type": "linear", "warmup": 4},
    "evaluation": {"every": {"steps": 2}},
    "checkpoint": {"every": {"steps": 1}, "keep": 4},
    "runtime": {"precision": "bf16-autocast"},
}
"""Its train config with the warm-up of a short run, and without TF32, which a CPU does not have."""


@pytest.mark.capability("C-49")
def test_the_train_config_of_chemlactica_behaves_as_documented(
    experiment: Experiment,
) -> None:
    experiment.write(recipe(**CHEMLACTICA))
    experiment.run()
    rows, directory = curve(experiment.at()), experiment.at()
    rates = [rows[step]["learning_rate"] for step in sorted(rows)]
    quarters = [1, 2, 3, 4, 4, 3, 2, 1]
    assert rates == pytest.approx([6e-4 * quarter / 4 for quarter in quarters])
    assert checkpoints(directory) == [5, 6, 7, 8]
    assert [row["step"] for row in read_lines(directory / "evaluation.jsonl")] == [
        2,
        4,
        6,
        8,
    ]
    text = (directory / "run.json").read_text("utf-8")
    assert all(f'"{name}"' in text for name in ("attention_dropout", "betas", "clipNorm"))

    # Dropout and bf16 are effective in the computation.
    def first_step(name: str, **changes: Any) -> dict[str, Any]:
        experiment.write(recipe(**merge(CHEMLACTICA, changes)), name=name)
        experiment.run("--stop-after-steps", "1", name=name, expect=STOPPED_SAVED)
        return curve(experiment.at(name))[1]

    plain = first_step("plain", model={"config": {"attention_dropout": 0.0}})
    assert plain["loss"] != rows[1]["loss"]
    assert first_step("wide", runtime={"precision": "fp32"})["loss"] != rows[1]["loss"]
