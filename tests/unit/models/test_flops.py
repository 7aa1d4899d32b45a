"""Operations of a token, worked out by hand, and the most that devices can do."""

import math

import pytest
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from evergrad_trainer.base.records import RunInfo, StepRecord
from evergrad_trainer.models.flops import PEAKS, find_peak, flops_per_token
from evergrad_trainer.observers.utilisation import flops_per_second, utilisation

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
# A block: queries and output 32 · 32 each, keys and values 32 · 16 each, three matrices of 32 · 64.
BLOCK = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
HEAD = 32 * 256


@pytest.mark.acceptance("number-C-40")
@pytest.mark.capability("C-40")
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_operations_of_a_llama_match_the_manual_calculation(is_tied: bool) -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=is_tied)
    # 12 · 2 layers · 4 heads · 8 · 16 tokens for attention.
    expected = 6 * (2 * BLOCK + HEAD) + 12 * 2 * 4 * 8 * 16
    found = flops_per_token(LlamaForCausalLM(config), config, sequence_length=16)
    assert found == expected == 159_744 + 12_288


def test_frozen_weights_need_no_operations_for_their_gradient() -> None:
    config = LlamaConfig(**SMALL, tie_word_embeddings=False)
    model = LlamaForCausalLM(config)
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    expected = 4 * 2 * BLOCK + 6 * HEAD + 12 * 2 * 4 * 8 * 16
    assert flops_per_token(model, config, sequence_length=16) == expected


def test_only_active_experts_of_a_mixture_are_counted() -> None:
    config = MixtralConfig(
        **SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )
    found = flops_per_token(MixtralForCausalLM(config), config, sequence_length=16)
    # Attention's matrices, the router of 32 · 4, and two of four experts.
    block = 2 * 32 * 32 + 2 * 32 * 16 + 32 * 4 + 2 * 3 * 32 * 64
    assert found == 6 * (2 * block + HEAD) + 12 * 2 * 4 * 8 * 16


def test_the_operations_of_a_model_without_a_configuration_are_unknown() -> None:
    assert flops_per_token(nn.Linear(4, 4), None, sequence_length=16) is None


@pytest.mark.parametrize(
    ("name", "precision", "products", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-autocast", "highest", 989.5),
        ("NVIDIA H100 80GB HBM3", "fp32", "high", 494.5),
        ("NVIDIA H100 80GB HBM3", "fp32", "highest", 67),
        ("NVIDIA H100 PCIe", "bf16", "highest", 756.5),
        ("NVIDIA H100 NVL", "bf16", "highest", 835.5),
        ("NVIDIA H200", "bf16", "highest", 989.5),
        ("NVIDIA A100-SXM4-80GB", "bf16", "highest", 312),
        ("NVIDIA A10", "bf16", "highest", 125),
        ("NVIDIA L4", "bf16", "highest", 121),
        ("NVIDIA L40S", "bf16", "highest", 362),
        ("Tesla V100-SXM2-16GB", "fp32", "highest", 15.7),
        ("Tesla V100-SXM2-16GB", "bf16", "highest", None),
        ("Tesla T4", "fp32", "highest", 8.1),
        ("NVIDIA GeForce RTX 4090", "bf16", "highest", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", "highest", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", "highest", None),
        ("NVIDIA A10G", "bf16", "highest", None),
        ("AMD Instinct MI300X", "bf16", "highest", 1307.4),
        ("Something New", "bf16", "highest", None),
    ],
)
def test_a_device_is_found_by_its_torch_name(
    name: str, precision: str, products: str, tera: float | None
) -> None:
    found = find_peak(name, precision=precision, matmul_precision=products)
    assert found == (None if tera is None else tera * 1e12)


def test_every_peak_names_its_source() -> None:
    assert len({one.device for one in PEAKS}) == len(PEAKS)
    for one in PEAKS:
        assert one.source and one.fp32 > 0
        assert one.bf16 is None or one.bf16 > one.fp32


def info(**changes: object) -> RunInfo:
    known = RunInfo(
        "run", 1, 2, 10, 0, 100, 4, 1, "bf16", "dataParallel", "llama", "/runs/run"
    )
    return RunInfo(**{**vars(known), **changes})


@pytest.mark.acceptance("number-C-40")
def test_utilisation_is_relative_to_the_devices_of_all_processes() -> None:
    def step(**changes: object) -> StepRecord:
        values = dict.fromkeys(StepRecord.__dataclass_fields__, 0.0) | {"step_seconds": 0.5}
        values |= {"world_size": 2, "tokens": 100, "skipped": None, "metrics": {}}
        return StepRecord(**{**values, **changes})  # type: ignore[arg-type]

    # 30 operations in half a second, on two devices with 100 operations per second each.
    known = info(flops_per_step=30.0, peak_flops=100.0)
    assert flops_per_second(known, step()) == 60.0
    assert utilisation(known, step()) == pytest.approx(0.3)
    assert utilisation(known, step(world_size=3)) == pytest.approx(0.2)
    # A skipped step, a clock that did not advance, and an unknown device and model.
    assert utilisation(known, step(tokens=0)) is None
    assert utilisation(known, step(step_seconds=0.0)) is None
    assert utilisation(known, step(step_seconds=math.nan)) is None
    assert utilisation(info(flops_per_step=30.0), step()) is None
    assert utilisation(info(peak_flops=100.0), step()) is None
