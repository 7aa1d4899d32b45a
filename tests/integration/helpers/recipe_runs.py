"""A tiny run of each recipe, for tests that apply to all of them: 12 steps of 6 micro-batches, saved every 5
steps and evaluated every 4."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import latent_corpus
from elastic_helpers import elastic_recipe
from run_helpers import (
    Experiment,
    assert_same_curve,
    assert_same_state,
    curve,
    events,
    merge,
    read_lines,
    write_documents,
)

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SFT: dict[str, Any] = {
    "recipe": "sft",
    "rows": {"chatTemplate": TEMPLATE},
    "data": {
        "sources": [{"name": "sums", "path": "rows.jsonl"}],
        "sequenceLength": 64,
        "heldOut": {"count": 5},
    },
    "evaluation": {"every": {"steps": 4}, "generation": {"maxNewTokens": 5}},
}
PAIRS: dict[str, Any] = {
    "recipe": "preference",
    "rows": {"chatTemplate": TEMPLATE},
    "data": {
        "sources": [{"name": "sums", "path": "pairs.jsonl"}],
        "sequenceLength": 48,
        "heldOut": {"count": 5},
    },
    "preference": {"beta": 0.5, "labelSmoothing": 0.1},
    "evaluation": {"every": {"steps": 4}},
}
DOCUMENTS: dict[str, Any] = {
    "data": {"heldOut": {"count": 6}},
    "evaluation": {"every": {"steps": 4}},
}
TWO_STAGES: dict[str, Any] = {
    "recipe": "two_stage_kl",
    "data": {
        "sources": [
            {"name": "docs", "path": "documents.jsonl"},
            {"name": "more", "path": "more.jsonl"},
        ],
        "heldOut": {"count": 4},
    },
    "twoStageKl": {
        "stages": [
            {"tokens": 500, "mixture": {"docs": 1}},
            {"mixture": {"docs": 1, "more": 3}, "beta": 2.0},
        ]
    },
    "evaluation": {"every": {"steps": 4}},
}
"""Steps of 96 tokens: the second stage starts with step 7."""


def write_rows(path: Path, *, count: int = 120) -> None:
    """Write rows of sums, as conversations and as prompts with completions."""
    source = random.Random(0)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        one, other = source.randrange(50), source.randrange(50)
        question, answer = f"{one}+{other}=", str(one + other)
        if at % 2:
            rows.append({"prompt": question, "completion": answer})
        else:
            pair = [("user", question), ("assistant", answer)]
            rows.append(
                {"messages": [{"role": role, "content": said} for role, said in pair]}
            )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_pairs(path: Path, *, count: int = 60) -> None:
    """Write sums with a right and a wrong answer, as texts and as conversations."""
    source = random.Random(0)
    rows: list[dict[str, Any]] = []
    for at in range(count):
        one, other = source.randrange(50), source.randrange(50)
        question, good, bad = f"{one}+{other}=", str(one + other), str(one + other + 7)
        if at % 2:
            rows.append({"prompt": question, "chosen": good, "rejected": bad})
        else:
            talks = [
                [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": said},
                ]
                for said in (good, bad)
            ]
            rows.append({"chosen": talks[0], "rejected": talks[1]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_texts(folder: Path) -> None:
    """Write the documents of two sources."""
    write_documents(folder / "documents.jsonl")
    write_documents(folder / "more.jsonl", seed=7)


DATA: dict[str, Callable[[Path], Any]] = {
    "pretrain": write_texts,
    "sft": lambda folder: write_rows(folder / "rows.jsonl"),
    "two_stage_kl": write_texts,
    "latent_edit": lambda folder: latent_corpus.write_corpus(folder / "corpus"),
    "preference": lambda folder: write_pairs(folder / "pairs.jsonl"),
}
TRAINING: dict[str, dict[str, Any]] = {
    "pretrain": elastic_recipe(**DOCUMENTS),
    "sft": elastic_recipe(**SFT),
    "two_stage_kl": elastic_recipe(**TWO_STAGES),
    "latent_edit": latent_corpus.training(evaluation={"every": {"steps": 4}}),
    "preference": elastic_recipe(**PAIRS),
}
RECIPES = tuple(TRAINING)


def write_recipe(experiment: Experiment, recipe: str, **changes: Any) -> None:
    """Write the data of a recipe and its ``tiny.yaml``, with changes of ``spec.training``."""
    DATA[recipe](experiment.path)
    experiment.write(merge(TRAINING[recipe], changes))


def measured(directory: Path) -> dict[tuple[int, str], Any]:
    """Return the evaluation results by step and set. If a step has two, the last result counts."""
    return {
        (row["step"], row["name"]): (row["loss"], row["tokens"], row.get("metrics"))
        for row in read_lines(directory / "evaluation.jsonl")
    }


def assert_same_run(one: Path, other: Path) -> None:
    """Check that both runs have the same samples, losses, metrics, evaluations, snapshots and tensors."""
    assert_same_curve(one, other)
    assert_same_state(one, other)
    assert {step: row.get("metrics") for step, row in curve(one).items()} == {
        step: row.get("metrics") for step, row in curve(other).items()
    }
    assert measured(one) == measured(other) and measured(one)
    assert {found["hash"] for found in events(one, "snapshot")} == {
        found["hash"] for found in events(other, "snapshot")
    }
