"""The loss of rows: by hand, and the same packed and by themselves."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from evergrad_manifest.training import Training
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.prepare import prepare
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.recipes import load_task
from evergrad_trainer.task import Modules, Task

ROWS = [
    {"prompt": "ab", "completion": "c"},
    {"prompt": "", "completion": "abc"},
    {"prompt": "abcabc", "completion": "bb"},
    {"prompt": "a", "completion": "a"},
    {"prompt": "cccc", "completion": "ab"},
]
LENGTH = 12


class Bigrams(nn.Module):
    """Gives the byte after a byte a probability of three quarters, and the 256 others the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        logits = torch.zeros(*input_ids.shape, 257)
        following = (input_ids + 1).clamp(max=256)
        logits.scatter_(-1, following[..., None], math.log(3 * 256))
        return SimpleNamespace(logits=logits + self.weight)


def training(**changes: Any) -> Training:
    data = {"sources": [{"name": "rows", "path": "rows.jsonl"}], "sequenceLength": LENGTH}
    values: dict[str, Any] = {
        "recipe": "sft",
        "model": {"config": {"model_type": "llama"}},
        "data": {**data, **changes.pop("data", {})},
        "batching": {"globalBatchSize": 2, "microBatchSize": 1},
        "optimizer": {"learningRate": 1e-3},
        "horizon": {"steps": 10},
    }
    return Training.model_validate({**values, **changes})


def prepare_rows(folder: Path, settings: Training) -> Prepared:
    """ROWS, ready to be read."""
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(text)
    return prepare(
        settings, base_directory=folder, prepared_directory=folder / "prepared", workers=1
    )


def open_task(folder: Path, settings: Training) -> tuple[Task, Any]:
    """The task, and its only source over ROWS."""
    task, _ = load_task(settings, folder)
    (stage,) = task.stages(prepare_rows(folder, settings))
    ((source, _weight),) = stage.sources.values()
    return task, (source, stage)


def sums(task: Task, opened: Any, model: nn.Module) -> tuple[float, int, int]:
    """Return the sum of the losses of all samples, their weight, and their number."""
    source, stage = opened
    total, weight = 0.0, 0
    for item in range(len(source)):
        rows = source.read([item])
        loss = task.loss(Modules(trained={"model": model}), rows.tensors, stage)
        total += float(loss.total.detach())
        weight += rows.weight
    return total, weight, len(source)


@pytest.mark.acceptance("8d-13a:sft", "number-C-37")
@pytest.mark.capability("C-37")
def test_the_loss_of_completions_matches_the_manual_calculation(
    tmp_path: Path,
) -> None:
    task, opened = open_task(tmp_path, training())
    total, weight, _ = sums(task, opened, Bigrams())
    # Labels (with the preceding token) and ends: c after b, then E; a without a predecessor is not a label, b
    # and c after their predecessors, E; b after c, b after b, E; a after a, E; a after c, b after a, E.
    right = ["bc", "ab", "bc", "ab"]
    wrong = ["cE", "cE", "cb", "bb", "bE", "aa", "aE", "ca", "bE"]
    assert weight == len(right) + len(wrong) == 13
    expected = -len(right) * math.log(3 / 4) - len(wrong) * math.log(1 / 4 / 256)
    assert total == pytest.approx(expected, rel=1e-6)


def test_all_tokens_are_learned_on_request(tmp_path: Path) -> None:
    task, opened = open_task(tmp_path, training(rows={"learn": "everything"}))
    _, weight, _ = sums(task, opened, Bigrams())
    # All tokens but the first of each row; each has an end.
    assert weight == sum(len(row["prompt"] + row["completion"]) for row in ROWS)


@pytest.mark.acceptance("8d-13b:sft")
@pytest.mark.capability("A-44", "T-11", "T-52")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_loss_of_packed_rows_equals_the_sum_over_single_rows(
    tmp_path: Path, name: str
) -> None:
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2} if name == "gpt2" else {}
    if name == "llama":
        size = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 2}
    config = AutoConfig.for_model(name, vocab_size=257, **size)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

    found = {}
    for packing in ("documents", "none"):
        folder = tmp_path / packing
        folder.mkdir()
        task, opened = open_task(folder, training(data={"packing": packing}))
        found[packing] = sums(task, opened, model)
    packed, alone = found["documents"], found["none"]
    assert packed[2] < alone[2] == len(ROWS)
    assert packed[1] == alone[1]
    assert packed[0] == pytest.approx(alone[0], rel=1e-5)


def test_a_packed_sample_has_whole_rows_with_their_own_positions(
    tmp_path: Path,
) -> None:
    _, (source, _) = open_task(tmp_path, training())
    # Rows take 3, 3, 8, 2 and 6 places: 8 and 3, 6 and 3 and 2 share a sample of 12.
    assert source.describe(0) == "rows.jsonl, line 3; rows.jsonl, line 1"
    rows = source.read([1]).tensors
    end, none = 256, IGNORE_INDEX
    a, b, c = b"abc"
    assert rows["input_ids"].tolist() == [[*b"ccccab", a, b, c, *b"aa", 0]]
    assert rows["labels"].tolist() == [
        [none, none, none, a, b, end, b, c, end, a, end, none]
    ]
    assert rows["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 0, 1, 2, 0, 1, 0]]


def test_packing_and_learned_tokens_are_part_of_the_fingerprints(
    tmp_path: Path,
) -> None:
    found: dict[str, set[str]] = {"facts": set(), "source": set(), "set": set()}
    held_out = {"heldOut": {"count": 1}}
    choices: list[dict[str, Any]] = [
        {"data": held_out},
        {"data": {**held_out, "packing": "none"}},
        {"data": held_out, "rows": {"learn": "everything"}},
    ]
    # Each twice: it is also the same for the same choice.
    for changes in (*choices, *choices):
        settings = training(**changes)
        task, (source, stage) = open_task(tmp_path, settings)
        evaluator = task.evaluators(prepare_rows(tmp_path, settings))["heldOut"]
        measured = EvaluationSet("any", evaluator.sources, micro_batch_size=1)
        found["facts"].add(json.dumps(stage.facts, sort_keys=True))
        found["source"].add(source.fingerprint)
        found["set"].add(measured.fingerprint)
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys(found, 3)
