"""A model that is sharded from the start: the bits of a whole one, bf16 products over fp32 sums, sums of
every slot."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from evergrad_manifest.training import Training
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.token_source import INPUT_IDS, LABELS
from evergrad_trainer.models.build import ModelPlan, build_model, plan_model
from evergrad_trainer.models.parallel import build_gradient_sum
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.opening import Opened
from evergrad_trainer.training.build import build_machinery
from evergrad_trainer.world import World

processes: Any = sys.modules.get("checkpoint_processes")
if processes is None:
    _spec = importlib.util.spec_from_file_location(
        "checkpoint_processes", Path(__file__).with_name("checkpoint_processes.py")
    )
    assert _spec is not None and _spec.loader is not None
    processes = sys.modules["checkpoint_processes"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(processes)

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
IDS = torch.arange(24).reshape(2, 12)
SLOTS = 3


def make_training(precision: str, **config: Any) -> Training:
    return Training.model_validate(
        {
            "model": {"config": {**CONFIG, **config}},
            "data": {
                "sources": [{"name": "docs", "path": "documents.jsonl"}],
                "sequenceLength": 12,
            },
            "batching": {"globalBatchSize": 2 * SLOTS, "microBatchSize": 2},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 2},
            "runtime": {"precision": precision, "parallelism": "fsdp2", "compile": "off"},
        }
    )


CASES = {
    "fp32": ("fp32", False),
    "tied": ("fp32", True),
    "bf16": ("bf16-autocast", False),
    "fp16": ("fp16-autocast", False),
}
TOLERANCES = {"bf16": 0.03, "fp16": 0.004}
"""Of products with 8 and with 11 bits."""


def train_sharded(world: World, directory: Path) -> dict[str, Any]:
    """What a rank of two finds out about each case."""
    return {name: _examine(world, directory, *case) for name, case in CASES.items()}


def _examine(
    world: World, directory: Path, precision: str, is_tied: bool
) -> dict[str, Any]:
    """Build the model sharded and whole, and compare weights, and gradients of slots that all ranks compute
    alike."""
    training = make_training(precision, tie_word_embeddings=is_tied)
    plan = plan_model(training.model, base_directory=directory, vocab_size=257)
    task, code = load_task(training, directory)
    stage = Stage({})
    # No data: what is built does not depend on it.
    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(stage,)))
    machinery = build_machinery(
        training, Opened(task, code, data, {}), plan, world, with_weights=True
    )
    parameters: dict[str, Any] = dict(machinery.model.named_parameters())
    whole = dict(build_model(plan, seed=0, precision="fp32").named_parameters())
    initial = {name: value.full_tensor().detach() for name, value in parameters.items()}

    gradients = build_gradient_sum(
        machinery.model, training, slots_per_step=SLOTS, is_sharded=True
    )
    gradients.begin(world)
    held = []
    for slot in range(SLOTS):
        gradients.before_backward(is_last=slot == SLOTS - 1)
        with machinery.autocast():
            machinery.loss_of({INPUT_IDS: IDS, LABELS: IDS}, stage).total.backward()
        gradients.after_backward()
        held.append(sum(p.grad.to_local().numel() for p in parameters.values()))
    gradients.finish()

    expected = whole_gradients(plan)
    sums = {
        name: value.grad.full_tensor() / (2 * SLOTS) for name, value in parameters.items()
    }
    errors = {
        name: (sums[name] - value).norm() / value.norm() for name, value in expected.items()
    }
    return {
        "is_sharded": all(isinstance(value, DTensor) for value in parameters.values()),
        "names": [name for name in initial if name not in whole]
        + [n for n in whole if n not in initial],
        "changed": [
            name for name, value in initial.items() if not torch.equal(value, whole[name])
        ],
        "types": sorted({str(value.grad.dtype) for value in parameters.values()}),
        "held": held,
        "size": sum(value.numel() for value in whole.values()),
        "error": float(max(errors.values())),
    }


def whole_gradients(plan: ModelPlan) -> dict[str, torch.Tensor]:
    model = build_model(plan, seed=0, precision="fp32")
    causal_lm_loss(model)(IDS, IDS).backward()
    return {
        name: value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }


@pytest.mark.capability("T-5")
def test_a_sharded_model_begins_as_a_whole_one_and_sums_every_slot_in_fp32(
    tmp_path: Path,
) -> None:
    ranks = processes.values(
        processes.run_world(train_sharded, size=2, directory=tmp_path / "run")
    )
    for name in CASES:
        found = [rank[name] for rank in ranks]
        for one in found:
            assert one["is_sharded"] and one["names"] == [] and one["changed"] == []
            assert one["types"] == ["torch.float32"]
            # The first slot's gradients are cut already: no rank ever holds those of the whole model.
            assert len(set(one["held"])) == 1
            assert one["error"] < TOLERANCES.get(name, 1e-5)
        assert sum(one["held"][0] for one in found) == found[0]["size"]
