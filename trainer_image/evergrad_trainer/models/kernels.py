"""Selects kernels from the manifest: the precision of fp32 matrix products, and the attention backend."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import torch
from torch.nn import functional

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Runtime
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.models.build import DTYPES, PRODUCTS, ModelPlan

SWITCHES: Final[dict[str, Callable[[bool], object]]] = {
    "flash": torch.backends.cuda.enable_flash_sdp,
    "efficient": torch.backends.cuda.enable_mem_efficient_sdp,
    "cudnn": torch.backends.cuda.enable_cudnn_sdp,
    "math": torch.backends.cuda.enable_math_sdp,
}
"""The switches of torch. They apply to the CPU too, despite the name of their module."""
_TRIED_TOKENS: Final = 64
"""Sequence length of the backend test. The conditions of the backends do not depend on it."""
_RUNTIME: Final = "spec.training.runtime"
_FIRST_WITH_TF32: Final = (8, 0)
"""Compute capability of the first accelerators that support TF32 (Ampere)."""


@dataclass(frozen=True)
class AttentionShape:
    """The properties of a model that determine which attention backends a device supports."""

    num_heads: int
    num_key_value_heads: int
    """Number of key and value heads; smaller than ``num_heads`` if several queries share a key."""
    head_size: int
    dtype: torch.dtype


def attention_shape(plan: ModelPlan, *, precision: str) -> AttentionShape | None:
    """Return the attention shape of the planned model.

    Returns None if there is no model, if its attention is eager, or if the configuration lacks the sizes.
    """
    if plan.config is None or plan.attention == "eager":
        return None
    config = plan.config.get_text_config()
    heads, hidden = (
        getattr(config, name, None) for name in ("num_attention_heads", "hidden_size")
    )
    if not heads or not hidden:
        return None
    return AttentionShape(
        num_heads=int(heads),
        num_key_value_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_size=int(getattr(config, "head_dim", None) or hidden // heads),
        # Under autocast, attention also computes in the type of products.
        dtype=PRODUCTS[precision],
    )


def choose_kernels(
    device: torch.device,
    runtime: Runtime,
    *,
    shape: AttentionShape | None,
    is_eager: bool = False,
) -> dict[str, str]:
    """Set both choices for this process, and return them with the device, for the run's provenance.

    ``shape``: the attention to test on the device; None if it is unknown, for example for a module that is
    not a language model. ``is_eager``: the model computes attention as matrix products instead of calling a
    kernel. Raises ModelError if the device does not support a choice.
    """
    if is_eager and (problem := problem_of_eager(runtime)) is not None:
        raise ModelError(problem)
    _check_matmul_precision(device, runtime)
    # torch has one switch per process. Set the default too, because the process may serve another run later.
    torch.set_float32_matmul_precision(runtime.matmul_precision)
    # Set convolutions too: torch computes them in TF32 by default.
    torch.backends.cudnn.allow_tf32 = runtime.matmul_precision == "high"
    chosen = _choose_attention(device, runtime.attention, shape)
    return {
        "device": device.type,
        "matmulPrecision": runtime.matmul_precision,
        "attention": "eager" if is_eager else chosen,
    }


def _check_matmul_precision(device: torch.device, runtime: Runtime) -> None:
    """Raise ModelError if ``matmulPrecision: high`` is set and the device has no TF32."""
    why = ""
    if runtime.matmul_precision == "high" and device.type != "cuda":
        why = "only accelerators have TF32"
    elif runtime.matmul_precision == "high":
        capability = torch.cuda.get_device_capability(device)
        if capability < _FIRST_WITH_TF32:
            found = ".".join(map(str, capability))
            why = f"TF32 came with compute capability 8.0, and this device has {found}"
    if why:
        raise ModelError(
            Problem(
                f"{_RUNTIME}.matmulPrecision",
                f"high is not possible on {device}",
                why,
                "Set matmulPrecision: highest, or leave it out",
            )
        )


def _choose_attention(
    device: torch.device, attention: str, shape: AttentionShape | None
) -> str:
    """Switch on the attention kernels, and return the kernel that is used.

    Raises ModelError if the device has no such kernel for this shape.
    """
    # Use the switches of the process, not a context around the forward pass, because recomputation in the
    # backward pass must use the same backend.
    _switch_on(attention)
    chosen = (
        attention
        if shape is None
        else _try_attention(device, shape, runs=attention != "auto")
    )
    if shape is not None and attention not in ("auto", chosen):
        _switch_on("auto")
        raise ModelError(
            Problem(
                f"{_RUNTIME}.attention",
                f"{attention} is not possible for this model on {device}",
                f"torch has no such kernel there for {shape.num_heads} heads of {shape.head_size} in "
                f"{str(shape.dtype).removeprefix('torch.')}",
                "Set attention: auto, or leave it out",
            )
        )
    return chosen


def problem_of_eager(runtime: Runtime) -> Problem | None:
    """Return the problem if the manifest chooses an attention backend for an eager model, else None."""
    if runtime.attention == "auto":
        return None
    return Problem(
        f"{_RUNTIME}.attention",
        f"{runtime.attention} cannot be used for this model",
        "transformers has only eager attention for it, which calls no kernel",
        "Set attention: auto, or leave it out",
    )


def _switch_on(attention: str) -> None:
    for name, switch in SWITCHES.items():
        switch(attention in ("auto", name))


def _try_attention(device: torch.device, shape: AttentionShape, *, runs: bool) -> str:
    """Return the backend that torch selects on ``device``; ``none`` if no enabled backend supports the shape.

    ``runs``: also run the backend, because some backends fail only when they run.
    """
    query, key = (
        torch.zeros(
            (1, heads, _TRIED_TOKENS, shape.head_size),
            dtype=shape.dtype,
            device=device,
            requires_grad=True,
        )
        for heads in (shape.num_heads, shape.num_key_value_heads)
    )
    try:
        chosen = torch_private.attention_backend(query, key)
        if runs:
            is_grouped = shape.num_heads != shape.num_key_value_heads
            functional.scaled_dot_product_attention(
                query, key, key, is_causal=True, enable_gqa=is_grouped
            )
    except RuntimeError:
        return "none"
    return chosen


def choose_autocast(
    precision: str, device: torch.device
) -> Callable[[], AbstractContextManager[object]]:
    """Return the context for a forward pass: autocast if products have another type than the weights."""
    if PRODUCTS[precision] == DTYPES[precision]:
        return nullcontext
    return functools.partial(torch.autocast, device.type, dtype=PRODUCTS[precision])
