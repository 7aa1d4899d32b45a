"""Floating-point operations of a step, and the most that a device can do, for utilisation (MFU).

Counted is what the model needs, whatever the run computes besides: recomputation adds nothing. A
multiplication and an addition are two operations. Formula: Chowdhery et al., PaLM (arXiv 2204.02311),
appendix B.
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_TERA: Final = 1e12
_EXPERTS: Final = (
    "num_local_experts",
    "num_experts",
    "n_routed_experts",
    "moe_num_experts",
)
_CHOSEN: Final = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k")


@dataclass(frozen=True)
class Peak:
    """Speed of a device at best, in TFLOP/s of dense matrix products, by precision; ``source``: where the
    figures are published. None: it has no such units."""

    device: str
    bf16: float | None
    tf32: float | None
    fp32: float
    source: str


_NVIDIA: Final = "NVIDIA, {} datasheet; its figures with sparsity halved"
PEAKS: Final = (
    Peak("B200", 2250, 1125, 75, _NVIDIA.format("Blackwell architecture")),
    Peak("H200 NVL", 835.5, 417.5, 60, _NVIDIA.format("H200 Tensor Core GPU")),
    Peak("H200", 989.5, 494.5, 67, _NVIDIA.format("H200 Tensor Core GPU")),
    Peak("H100 NVL", 835.5, 417.5, 60, _NVIDIA.format("H100 Tensor Core GPU")),
    Peak("H100 PCIe", 756.5, 378, 51, _NVIDIA.format("H100 Tensor Core GPU")),
    Peak("H100", 989.5, 494.5, 67, _NVIDIA.format("H100 Tensor Core GPU")),
    Peak("A100", 312, 156, 19.5, _NVIDIA.format("A100 Tensor Core GPU")),
    Peak("A40", 149.7, 74.8, 37.4, _NVIDIA.format("A40")),
    Peak("A30", 165, 82, 10.3, _NVIDIA.format("A30 Tensor Core GPU")),
    Peak("A10", 125, 62.5, 31.2, _NVIDIA.format("A10 Tensor Core GPU")),
    Peak("L40S", 362, 183, 91.6, _NVIDIA.format("L40S")),
    Peak("L40", 181, 90.5, 90.5, _NVIDIA.format("L40")),
    Peak("L4", 121, 60, 30.3, _NVIDIA.format("L4 Tensor Core GPU")),
    Peak("V100-SXM2", None, None, 15.7, _NVIDIA.format("V100")),
    Peak("V100-PCIE", None, None, 14, _NVIDIA.format("V100")),
    Peak("T4", None, None, 8.1, _NVIDIA.format("T4")),
    Peak(
        "RTX 4090", 165.2, 82.6, 82.6, "NVIDIA, Ada GPU architecture whitepaper, appendix A"
    ),
    Peak(
        "RTX 3090", 71, 35.6, 35.6, "NVIDIA, GA102 GPU architecture whitepaper, appendix A"
    ),
    Peak("MI300X", 1307.4, 653.7, 163.4, "AMD, Instinct MI300X datasheet"),
)
"""Known devices. A device is the first one whose words all stand in its name: of two names of which one
contains the other the longer comes first."""


_OTHERS: Final = frozenset({"Laptop", "MIG", "Max-Q", "D", "Ti", "SUPER"})
"""Words of devices, or parts of one, that are slower or faster than what they are named after."""


def find_peak(name: str, *, precision: str, matmul_precision: str) -> float | None:
    """The most FLOP/s of the device that torch calls ``name``; None where it is not known.

    ``precision`` and ``matmul_precision`` as in ``spec.training.runtime``.
    """
    if _OTHERS & set(name.split()):
        return None
    words = set(re.split(r"[\s,()]+", name))
    # torch joins some words with a dash: "A100-SXM4-80GB".
    words |= {word.partition("-")[0] for word in words}
    for peak in PEAKS:
        if not words.issuperset(peak.device.split()) and not name.startswith(
            (f"Tesla {peak.device}", peak.device)
        ):
            continue
        found: float | None = peak.fp32
        if precision != "fp32":
            found = peak.bf16
        elif matmul_precision == "high":
            found = peak.tf32
        return None if found is None else found * _TERA
    return None


def device_peak(
    device: torch.device, *, precision: str, matmul_precision: str
) -> float | None:
    """The most FLOP/s of ``device``; None for a CPU, and for an accelerator that is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return find_peak(name, precision=precision, matmul_precision=matmul_precision)


def flops_per_token(
    model: nn.Module, config: "PreTrainedConfig | None", *, sequence_length: int
) -> float | None:
    """Operations of a token, forward and backward; None where the shape of attention is not known.

    Two operations a weight of a matrix forward, two for the gradient of its input, and two for its own,
    which frozen weights have not; embeddings are looked up and not multiplied. Attention: 12 · layers · heads
    · head size · length, over the whole square, as is the custom, although causal kernels compute half.
    """
    if config is None:
        return None
    text: Any = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    layers = getattr(text, "num_hidden_layers", None)
    hidden = getattr(text, "hidden_size", None)
    if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(hidden, int)):
        return None

    head_size = getattr(text, "head_dim", None) or hidden // heads
    seen = sequence_length
    if isinstance(window := getattr(text, "sliding_window", None), int):
        seen = min(seen, window)
    attention = 12.0 * layers * heads * head_size * seen

    # A mixture computes a token with the chosen experts alone.
    counts = [one for key in _EXPERTS if isinstance(one := getattr(text, key, None), int)]
    chosen = [one for key in _CHOSEN if isinstance(one := getattr(text, key, None), int)]
    share = 1.0
    if counts and chosen and counts[0]:
        share = min(1.0, chosen[0] / counts[0])
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    products = 0.0
    for name, weight in model.named_parameters():
        # The weights of a norm and biases are no matrices.
        if id(weight) in tables or weight.dim() < 2:
            continue
        is_expert = ".experts." in name and ".shared" not in name
        operations = 6 if weight.requires_grad else 4
        products += operations * weight.numel() * (share if is_expert else 1.0)

    # A head that shares the table of the embeddings multiplies with it all the same.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shared: Any = getattr(head, "weight", None)
    if shared is not None and id(shared) in tables:
        products += (6 if shared.requires_grad else 4) * shared.numel()
    return products + attention
