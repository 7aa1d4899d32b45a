"""A model that is sharded from the start: the bits of a whole one, bf16 products over fp32 sums, sums of
every slot."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkpoint_processes as processes
import pytest
import torch
from torch.distributed.tensor import DTensor

from evergrad_manifest.training import Training
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.token_source import INPUT_IDS, LABELS
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.build import ModelPlan, build_model, plan_model
from evergrad_trainer.models.parallel import build_gradient_sum
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.recipes import load_task
from evergrad_trainer.recipes.setup import Opened
from evergrad_trainer.training.build import build_machinery

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
    """Return the findings of one of two ranks about each case."""
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
    # No data, because the result of the build does not depend on them.
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
def test_a_sharded_model_starts_like_a_whole_one_and_sums_every_slot_in_fp32(
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
            # The first slot's gradients are already sharded: no rank ever holds those of the whole model.
            assert len(set(one["held"])) == 1
            assert one["error"] < TOLERANCES.get(name, 1e-5)
        assert sum(one["held"][0] for one in found) == found[0]["size"]


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    # Layers that hold their weights the other way round, biases, and a table of positions.
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2},
    # Norms of queries and keys.
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "num_key_value_heads": 2},
    # Experts as one tensor, and routers.
    "mixtral": {
        "model_type": "mixtral",
        "num_key_value_heads": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "output_router_logits": True,
    },
}
ADAPTERS = {"lora": {"rank": 4, "dropout": 0.25}}


def compute_both_ways(world: World, directory: Path) -> dict[str, Any]:
    """The losses of each family's slots in three steps, whole and cut, by precision."""
    found: dict[str, Any] = {}
    for precision in ("bf16-autocast", "fp16-autocast"):
        for name, family in FAMILIES.items():
            model = {"config": family if "n_embd" in family else {**CONFIG, **family}}
            cases = {name: model}
            if name == "llama":
                cases["adapters"] = {**model, **ADAPTERS}
            for case, settings in cases.items():
                found[f"{case} {precision}"] = {
                    parallelism: _losses(world, directory, settings, precision, parallelism)
                    for parallelism in ("dataParallel", "fsdp2")
                }
    return found


def _losses(
    world: World,
    directory: Path,
    model: dict[str, Any],
    precision: str,
    parallelism: str,
) -> list[float]:
    values = make_training(precision).model_dump(by_alias=True, exclude_unset=True)
    values["model"] = model
    values["runtime"]["parallelism"] = parallelism
    training = Training.model_validate(values)
    plan = plan_model(training.model, base_directory=directory, vocab_size=257)
    task, code = load_task(training, directory)
    data: Any = SimpleNamespace(train=SimpleNamespace(stages=(Stage({}),)))
    machinery = build_machinery(
        training, Opened(task, code, data, {}), plan, world, with_weights=True
    )
    assert machinery.is_sharded == (parallelism == "fsdp2")
    gradients = build_gradient_sum(
        machinery.model,
        training,
        slots_per_step=SLOTS,
        is_sharded=machinery.is_sharded,
    )
    losses = []
    for step in range(3):
        gradients.begin(world)
        for slot in range(SLOTS):
            torch.manual_seed(SLOTS * step + slot)
            ids = (IDS * (7 + slot) + step) % 257
            gradients.before_backward(is_last=slot == SLOTS - 1)
            with machinery.autocast():
                loss = machinery.loss_of({INPUT_IDS: ids, LABELS: ids}, Stage({})).total
            # Every rank computes all slots, so the sum over ranks is twice the sum of one rank.
            (loss / (2 * world.size * SLOTS * IDS.shape[1])).backward()
            gradients.after_backward()
            losses.append(float(loss.detach()))
        gradients.finish()
        assert machinery.optimizer is not None
        machinery.optimizer.step()
    return losses


def test_a_sharded_model_computes_like_a_whole_one_under_autocast(
    tmp_path: Path,
) -> None:
    """The weights that autocast rounds are gathered rounded, and no others; what blocks are given is not."""
    ranks = processes.values(
        processes.run_world(compute_both_ways, size=2, directory=tmp_path / "run")
    )
    for found in ranks:
        for case, losses in found.items():
            whole, cut = losses["dataParallel"], losses["fsdp2"]
            # Nothing has been added up over ranks before the first update.
            assert cut[:SLOTS] == whole[:SLOTS], case
            assert cut == pytest.approx(whole, rel=1e-6), case
            assert len(set(whole)) == len(whole), case
