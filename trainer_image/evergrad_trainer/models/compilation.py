"""Compilation of a model block by block: gradients of later blocks are summed while earlier ones are
computed."""

from collections.abc import Sequence

import torch
from torch import nn

from evergrad_manifest.training import Runtime
from evergrad_trainer.base.machine import has_cpp_compiler
from evergrad_trainer.models.parallel import transformer_blocks


def should_compile(runtime: Runtime, device: torch.device) -> bool:
    """Decide whether the model is compiled; ``auto``: on an accelerator, where kernels can be built."""
    if runtime.compile == "auto":
        return device.type == "cuda" and has_cpp_compiler()
    return runtime.compile == "on"


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> bool:
    """Compile each repeated block of ``model`` (or ``blocks``) in place, and return whether it has any.

    One graph of the whole model would be one node of autograd: its gradients come at once, after all of the
    backward pass, so that no sum over ranks could begin under it, and all of them are in memory beside the
    buckets. Blocks of one kind share one graph, which also compiles in a fraction of the time. FSDP2's
    gathers stay between the graphs.
    """
    blocks = blocks or transformer_blocks(model)
    for block in blocks:
        block.compile(dynamic=False)
    return bool(blocks)
