"""Pretraining on separated documents: the loss equals the loss of each document alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_manifest.training import Training
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.recipes import load_task
from evergrad_trainer.task import Modules

TEXTS = ["Evergrad trains.", "Ä, ö und ü", "x" * 30, "a", "漢字 and more"]
LENGTH = 24


def training(**data: Any) -> Training:
    sources = [{"name": "docs", "path": "docs.jsonl"}]
    return Training.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {"sources": sources, "sequenceLength": LENGTH, **data},
            "batching": {"globalBatchSize": 2, "microBatchSize": 1},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 10},
        }
    )


def pieces() -> list[list[int]]:
    """Return documents with their ends, cut where a window of LENGTH tokens (and its next token) ends."""
    tokens = [one for text in TEXTS for one in (*text.encode(), 256)]
    found: list[list[int]] = []
    for begin in range(0, len(tokens) - 1, LENGTH):
        piece: list[int] = []
        for token in tokens[begin : begin + LENGTH + 1]:
            piece.append(token)
            if token == 256:
                found.append(piece)
                piece = []
        found.append(piece)
    return [piece for piece in found if len(piece) > 1]


@pytest.mark.acceptance("8d-13b:pretrain")
@pytest.mark.capability("O-78")
@pytest.mark.parametrize("packing", ["documents", "concatenate"])
def test_the_loss_of_a_packed_window_equals_the_sum_over_its_documents(
    tmp_path: Path, packing: str
) -> None:
    text = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    (tmp_path / "docs.jsonl").write_text(text)
    settings = training(packing=packing)
    prepared = prepare(
        settings, base_directory=tmp_path, prepared_directory=tmp_path / "p", workers=1
    )
    task, _ = load_task(settings, tmp_path)
    (stage,) = task.stages(prepared)
    ((source, _weight),) = stage.sources.values()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=257,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

    total, weight = 0.0, 0
    for item in range(len(source)):
        rows = source.read([item])
        loss = task.loss(Modules(trained={"model": model}), rows.tensors, stage)
        total += float(loss.total.detach())
        weight += rows.weight

    alone = 0.0
    for piece in pieces():
        logits = model(input_ids=torch.tensor([piece[:-1]])).logits[0].detach()
        alone += float(
            functional.cross_entropy(logits, torch.tensor(piece[1:]), reduction="sum")
        )
    num_labels = sum(len(piece) - 1 for piece in pieces())
    if packing == "documents":
        assert weight == num_labels
        assert total == pytest.approx(alone, rel=1e-5)
    else:
        # The ends predict what follows them, and each token sees more.
        assert weight > num_labels
        assert total != pytest.approx(alone, rel=1e-3)
