"""Kernels that the file chooses: the precision of fp32 matrix products, and the backend of attention."""

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
"""torch's switches, which hold for the CPU as well, whatever their module is called."""
_TRIED_TOKENS: Final = 64
"""Length of the sequence on which a backend is tried: no backend's conditions depend on it."""
_RUNTIME: Final = "spec.training.runtime"
_FIRST_WITH_TF32: Final = (8, 0)
"""Compute capability of the first accelerators with TF32 (Ampere)."""


@dataclass(frozen=True)
class AttentionShape:
    """Properties that decide which backends of attention a device has for a model."""

    num_heads: int
    num_key_value_heads: int
    """Fewer than ``num_heads`` where several queries share a key."""
    head_size: int
    dtype: torch.dtype


def attention_shape(plan: ModelPlan, *, precision: str) -> AttentionShape | None:
    """The attention of the planned model; None where its configuration does not tell."""
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
        # Under autocast the products of attention are of its type as well.
        dtype=PRODUCTS[precision],
    )


def choose_kernels(
    device: torch.device,
    runtime: Runtime,
    *,
    shape: AttentionShape | None,
    is_eager: bool = False,
) -> dict[str, str]:
    """Set both choices for this process, and return what computes from here on, for the run's provenance.

    ``shape``: of the attention that is tried on the device; None where it is not known, such as for a module
    that is no language model. ``is_eager``: the model multiplies matrices where others call a kernel of
    attention. Raises ModelError where the device cannot do what was chosen.
    """
    attention = runtime.attention
    if is_eager and (problem := problem_of_eager(runtime)) is not None:
        raise ModelError(problem)
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
                f"high cannot be had on {device}",
                why,
                "Set matmulPrecision: highest, or leave it out",
            )
        )
    # torch has one switch for the process. The default is set, too: a process may serve another run later.
    torch.set_float32_matmul_precision(runtime.matmul_precision)
    # Convolutions are products, too, and torch makes them in TF32 unless it is told otherwise.
    torch.backends.cudnn.allow_tf32 = runtime.matmul_precision == "high"
    # Switches of the process and not a context around the forward pass: what is computed again in the
    # backward pass must take the same backend.
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
                f"{attention} cannot be had for this model on {device}",
                f"torch has no such kernel there for {shape.num_heads} heads of {shape.head_size} in "
                f"{str(shape.dtype).removeprefix('torch.')}",
                "Set attention: auto, or leave it out",
            )
        )
    return {
        "device": device.type,
        "matmulPrecision": runtime.matmul_precision,
        "attention": "eager" if is_eager else chosen,
    }


def problem_of_eager(runtime: Runtime) -> Problem | None:
    """The problem of a backend of attention that is chosen for a model which calls none; None if none is."""
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
    """Name the backend that torch takes on ``device``; ``none`` where nothing that is switched on can do it.

    ``runs``: the name is not enough, since some backends refuse only when they run.
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
    """Choose the context of a forward pass, whose products may be of another type than the weights."""
    if PRODUCTS[precision] == DTYPES[precision]:
        return nullcontext
    return functools.partial(torch.autocast, device.type, dtype=PRODUCTS[precision])
