"""Samples of the first step, shown as text by ``evergrad prepare --show-samples``."""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.commands.prepare import add_arguments, execute
from evergrad_trainer.data.batch import Batch
from evergrad_trainer.data.order import SampleId
from evergrad_trainer.data.sample_preview import show_samples
from evergrad_trainer.data.tokenizers import ByteTokenizer

Write = Callable[[Path, Sequence[str]], Path]


@pytest.fixture
def told(
    tmp_path: Path, documents: Write, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return the output of ``evergrad prepare`` for a run with steps of four windows of 16 tokens."""
    documents(tmp_path / "docs.jsonl", [f"{number:02}\tone line\n" for number in range(50)])
    training = {
        "model": {"config": {"model_type": "llama"}},
        "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
        "batching": {"globalBatchSize": 4, "microBatchSize": 2},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 10},
    }
    run = {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "shown"},
        "spec": {"training": training},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run))

    def prepare(*arguments: str) -> str:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        kept = ("--prepared-directory", str(tmp_path / "prepared"), "--workers", "1")
        assert (
            execute(parser.parse_args([str(tmp_path / "run.yaml"), *kept, *arguments])) == 0
        )
        return capsys.readouterr().out

    return prepare


@pytest.mark.capability("C-55")
def test_samples_of_the_first_step_are_shown_with_their_positions(
    told: Callable[..., str],
) -> None:
    [*samples] = json.loads(told("--json", "--show-samples", "3"))["firstStep"]
    assert len(samples) == 3
    for one in samples:
        [text] = one["texts"]
        assert one["sample"].startswith("docs/epoch 0/window ") and "one" in text
        assert one["learnedTokens"] == 16

    # As text the same, one JSON string per row: line ends are visible, and none is added.
    lines = told("--show-samples", "3").splitlines()
    assert [one["sample"] for one in samples] == [
        line for line in lines if "/window " in line
    ]
    assert all(json.dumps(one["texts"][0]) in lines for one in samples)


def test_at_most_the_samples_of_the_first_step_are_shown(
    told: Callable[..., str],
) -> None:
    assert len(json.loads(told("--json", "--show-samples", "10"))["firstStep"]) == 4
    assert "firstStep" not in json.loads(told("--json"))


def stream_of(tensors: dict[str, Any]) -> Any:
    """A stream of one slot of one sample."""
    batch = Batch(tensors, weight=1, samples=(SampleId(0, 0, 0),), hash=0)
    return SimpleNamespace(
        first_step=1,
        slots_per_step=1,
        slot=lambda step, slot: batch,
        describe=lambda sample: "a/0",
    )


def test_both_rows_of_a_pair_are_shown() -> None:
    rows = torch.tensor([[list(b"yes"), list(b"no ")]])
    labels = torch.tensor([[[-100, 1, 2], [-100, -100, 3]]])
    shown = show_samples(
        stream_of({"input_ids": rows, "labels": labels}),
        ByteTokenizer(),
        count=1,
        asked_by="-s",
    )
    assert shown == [{"sample": "a/0", "texts": ["yes", "no "], "learnedTokens": 3}]


def test_padding_of_a_row_is_not_shown() -> None:
    """A token of id 0 within a row is shown: it is learned, has a position, or others follow."""
    rows = torch.tensor([[list(b"yes\0\0"), list(b"n\0o\0\0")]])
    labels = torch.tensor([[[-100, 1, 2, -100, -100], [-100, -100, -100, 3, -100]]])

    def texts(**more: Any) -> list[str]:
        tensors = {"input_ids": rows, "labels": labels, **more}
        stream = stream_of(tensors)
        [one] = show_samples(stream, ByteTokenizer(), count=1, asked_by="-s")
        assert one["learnedTokens"] == 3
        return list(one["texts"])

    assert texts() == ["yes", "n\0o\0"]
    positions = torch.tensor([[[0, 1, 2, 3, 0], [0, 1, 2, 3, 0]]])
    assert texts(position_ids=positions) == ["yes\0", "n\0o\0"]


def test_batches_without_tokens_are_described_instead_of_shown() -> None:
    said = "-s: the recipe has no text to show; its batches contain no input_ids. Leave it out."
    with pytest.raises(ConfigurationError, match=said):
        show_samples(
            stream_of({"states": torch.zeros(1, 4)}),
            ByteTokenizer(),
            count=1,
            asked_by="-s",
        )
