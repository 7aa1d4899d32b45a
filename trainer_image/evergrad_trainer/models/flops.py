"""Floating-point operations of a step, and peak rates of devices, for the utilisation (MFU).

Only operations that the model needs are counted, so recomputation adds nothing. A multiplication and an
addition are two operations. Formula: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B.
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
    """The peak rates of a device for dense matrix products, in TFLOP/s, by precision.

    A rate is None if the device has no units for this precision. ``source``: the publication of the figures.
    """

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
"""Known devices. The first entry whose words all occur in the name of a device applies. If one entry contains
the words of another entry, the longer entry must come first."""


_OTHERS: Final = frozenset({"Laptop", "MIG", "Max-Q", "D", "Ti", "SUPER"})
"""Words in names of variants whose rates differ from the device with the same name."""


def find_peak(name: str, *, precision: str, matmul_precision: str) -> float | None:
    """Return the peak FLOP/s of the device with torch's name ``name``; None if it is unknown.

    ``precision`` and ``matmul_precision`` have the values of ``spec.training.runtime``.
    """
    if _OTHERS & set(name.split()):
        return None
    words = set(re.split(r"[\s,()]+", name))
    # Some names in torch join words with a hyphen, for example "A100-SXM4-80GB".
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
    """Return the peak FLOP/s of ``device``; None for a CPU or an unknown accelerator."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return find_peak(name, precision=precision, matmul_precision=matmul_precision)


def flops_per_token(
    model: nn.Module, config: "PreTrainedConfig | None", *, sequence_length: int
) -> float | None:
    """Return the operations per token, forward and backward; None if the shape of attention is unknown.

    Each weight of a matrix counts two operations in the forward pass, two for the gradient of the input, and
    two for the gradient of the weight, unless it is frozen. Embeddings are looked up and do not count.
    Attention counts 12 · layers · heads · head size · length. By convention this is the whole square,
    although causal kernels compute half of it.
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

    # In a mixture of experts, only the chosen experts process a token.
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
        # Skip biases and weights of norms, which are not matrices.
        if id(weight) in tables or weight.dim() < 2:
            continue
        is_expert = ".experts." in name and ".shared" not in name
        operations = 6 if weight.requires_grad else 4
        products += operations * weight.numel() * (share if is_expert else 1.0)

    # Count a head that shares its weights with the embeddings, because it multiplies with them.
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shared: Any = getattr(head, "weight", None)
    if shared is not None and id(shared) in tables:
        products += (6 if shared.requires_grad else 4) * shared.numel()
    return products + attention
