"""Memory calculated from a plan, and the page that shows it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.training import Training
from evergrad_trainer.models.memory import ModelFacts, largest_fit, memory_of

PAGE = Path(__file__).parents[3] / "docs/train/model-sizes.md"
LLAMA_8B = ModelFacts(
    8_030_261_248, hidden_size=4096, num_layers=32, vocab_size=128_256, max_positions=8192
)
DEVICES = {"80 GB": 85_520_809_984, "141 GB": 150_109_880_320}
"""Bytes that torch reports for an H100 and an H200."""
PLANS: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    ("dataParallel, fp32", {"precision": "fp32"}, {}, 8),
    ("dataParallel, bf16-autocast", {}, {}, 8),
    ("dataParallel, bf16-autocast, exact", {}, {"elastic": "exact"}, 8),
    ("dataParallel, bf16", {"precision": "bf16"}, {}, 8),
    ("fsdp2, bf16-autocast", {"parallelism": "fsdp2"}, {}, 8),
    ("fsdp2, bf16-autocast", {"parallelism": "fsdp2"}, {}, 16),
    ("fsdp2, bf16-autocast", {"parallelism": "fsdp2"}, {}, 64),
]


def training(
    runtime: dict[str, Any] | None = None, reproducibility: dict[str, Any] | None = None
) -> Training:
    return Training.model_validate(
        {
            "model": {"config": {"model_type": "llama"}},
            "data": {
                "sources": [{"name": "docs", "path": "docs.jsonl"}],
                "sequenceLength": 4096,
            },
            "batching": {"globalBatchSize": 64, "microBatchSize": 1},
            "optimizer": {"learningRate": 1e-3},
            "horizon": {"steps": 100},
            "runtime": runtime or {},
            "reproducibility": reproducibility or {},
        }
    )


def need(facts: ModelFacts, plan: Training, world_size: int = 8) -> Any:
    return memory_of(facts, plan, world_size=world_size, on_accelerator=True, compiles=True)


def test_the_state_matches_the_numbers_of_the_manual() -> None:
    facts = replace(LLAMA_8B, parameters=10**9)
    states = {
        name: need(facts, training(*sections), size).state
        for name, *sections, size in PLANS[:4]
    }
    assert [value // 10**9 for value in states.values()] == [16, 18, 26, 8]
    assert need(facts, training({"parallelism": "fsdp2"}), 64).state == 16 * 10**9 // 64


def test_the_state_depends_on_the_optimizer() -> None:
    tables = 2 * LLAMA_8B.vocab_size * LLAMA_8B.hidden_size
    states = {}
    for kind in ("adamw", "lion", "sgd", "muon", "adafactor"):
        plan = training({"precision": "fp32"})
        optimizer = plan.optimizer.model_copy(update={"type": kind})
        plan = plan.model_copy(update={"optimizer": optimizer})
        states[kind] = need(LLAMA_8B, plan).state / 4 - 2 * LLAMA_8B.parameters
    each = LLAMA_8B.parameters
    assert states == {
        "adamw": 2 * each,
        "lion": each,
        "sgd": each,
        "muon": each + tables,
        "adafactor": 0,
    }
    plan = training({"precision": "fp32"})
    still = plan.optimizer.model_copy(update={"type": "sgd", "momentum": 0.0})
    plan = plan.model_copy(update={"optimizer": still})
    assert need(LLAMA_8B, plan).state == 8 * each


def test_a_single_process_does_not_shard_its_state() -> None:
    sharded, plain = training({"parallelism": "fsdp2"}), training()
    assert need(LLAMA_8B, sharded, 1).state == need(LLAMA_8B, plain, 1).state


def test_replicas_of_a_sharded_model_have_the_size_of_their_shards() -> None:
    whole, copies = (
        need(LLAMA_8B, training({"parallelism": "fsdp2", **more}), 64)
        for more in ({}, {"shards": 8})
    )
    alone = need(LLAMA_8B, training({"parallelism": "fsdp2"}), 8)
    assert copies == alone and copies.state == 8 * whole.state


def test_gradients_of_a_compiled_block_are_counted_in_addition_to_the_buckets() -> None:
    plain = memory_of(
        LLAMA_8B, training(), world_size=8, on_accelerator=True, compiles=False
    )
    assert 0 < need(LLAMA_8B, training()).total - plain.total < plain.state // 32


def test_recomputation_and_lower_precision_need_less_memory() -> None:
    plain = need(LLAMA_8B, training({"precision": "fp32"}))
    recomputed = need(
        LLAMA_8B, training({"precision": "fp32", "activationCheckpointing": True})
    )
    assert recomputed.activations < plain.activations / 8
    selective = need(
        LLAMA_8B, training({"precision": "fp32", "activationCheckpointing": "selective"})
    )
    assert recomputed.activations < selective.activations < 0.8 * plain.activations
    assert need(LLAMA_8B, training()).activations == plain.activations // 2


@pytest.mark.capability("A-23")
def test_offloaded_block_inputs_use_host_memory() -> None:
    full, offloaded = (
        need(LLAMA_8B, training({"activationCheckpointing": mode}))
        for mode in ("full", "offload")
    )
    # 4,096 tokens of 4,096 values in bf16, for each of 32 blocks.
    assert (full.host, offloaded.host) == (0, 2**30)
    assert full.total - offloaded.total == offloaded.host
    # Pinned memory is allocated in powers of two.
    wider = replace(LLAMA_8B, hidden_size=LLAMA_8B.hidden_size + 1)
    plan = training({"activationCheckpointing": "offload"})
    assert need(wider, plan).host == 2 * offloaded.host
    # Without an accelerator both memories are one.
    on_cpu = {"world_size": 8, "on_accelerator": False, "compiles": False}
    one, other = (
        memory_of(LLAMA_8B, training({"activationCheckpointing": mode}), **on_cpu)
        for mode in ("full", "offload")
    )
    assert one == other


def test_chunked_logits_need_the_memory_of_a_chunk_and_of_the_head_gradient() -> None:
    whole, chunked = (
        need(LLAMA_8B, training(runtime)) for runtime in ({}, {"lossChunk": 512})
    )
    assert chunked.logits == whole.logits // 8 + 4 * 128_256 * 4096 < whole.logits


def with_reference(plain: Training) -> Training:
    return Training.model_validate(
        {
            **plain.model_dump(by_alias=True, exclude_unset=True),
            "recipe": "two_stage_kl",
            "twoStageKl": {"stages": [{"tokens": 1}, {}]},
        }
    )


def test_a_reference_model_adds_only_its_weights_and_chunked_logits() -> None:
    plain = training({"precision": "fp32", "lossChunk": 512})
    one, two = need(LLAMA_8B, plain), need(LLAMA_8B, with_reference(plain))
    assert two.state - one.state == 4 * LLAMA_8B.parameters
    assert two.logits - one.logits == 512 * 128_256 * 12
    assert (two.activations, two.gathered) == (one.activations, one.gathered)


def test_the_head_of_a_sharded_reference_model_is_gathered_in_addition_to_the_models() -> (
    None
):
    plain = training({"parallelism": "fsdp2", "lossChunk": 512})
    one, two = need(LLAMA_8B, plain), need(LLAMA_8B, with_reference(plain))
    assert two.gathered - one.gathered == 128_256 * 4096 * 2
    assert two.state - one.state == 4 * LLAMA_8B.parameters // 8


def test_the_suggested_micro_batch_is_the_largest_that_fits() -> None:
    for _, runtime, reproducibility, world_size in PLANS:
        plan = training({**runtime, "activationCheckpointing": True}, reproducibility)
        options: dict[str, Any] = {
            "world_size": world_size,
            "on_accelerator": True,
            "compiles": True,
        }
        fit = largest_fit(LLAMA_8B, plan, available=10**11, **options)
        assert fit is not None and 0.99e11 < memory_of(fit, plan, **options).total <= 10**11


def test_nothing_fits_if_the_logits_alone_do_not_fit() -> None:
    options: dict[str, Any] = {"world_size": 8, "on_accelerator": True, "compiles": True}
    assert largest_fit(LLAMA_8B, training(), available=10**9, **options) is None


def table_row(
    name: str, runtime: dict[str, Any], reproducibility: dict[str, Any], world_size: int
) -> str:
    plan = training({**runtime, "activationCheckpointing": True}, reproducibility)
    cells = []
    for available in DEVICES.values():
        fit = largest_fit(
            LLAMA_8B,
            plan,
            available=available,
            world_size=world_size,
            on_accelerator=True,
            compiles=True,
        )
        cells.append("-" if fit is None else f"{fit.parameters / 1e9:.1f}B")
    return f"| {name} | {world_size} | {' | '.join(cells)} |"


@pytest.mark.parametrize("plan", PLANS, ids=[f"{plan[0]} x {plan[3]}" for plan in PLANS])
def test_the_page_of_sizes_matches_the_calculation(plan: Any) -> None:
    assert table_row(*plan) in PAGE.read_text(encoding="utf-8").splitlines()
