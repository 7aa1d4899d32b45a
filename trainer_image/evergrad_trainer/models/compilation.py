"""Compiles a model block by block, so that gradients are summed while earlier blocks still compute."""

from collections.abc import Sequence

import torch
from torch import nn

from evergrad_manifest.training import Runtime
from evergrad_trainer.base.machine import has_cpp_compiler
from evergrad_trainer.models.parallel import transformer_blocks


def should_compile(runtime: Runtime, device: torch.device) -> bool:
    """Whether to compile the model. ``auto`` compiles on an accelerator if there is a C++ compiler."""
    if runtime.compile == "auto":
        return device.type == "cuda" and has_cpp_compiler()
    return runtime.compile == "on"


def compile_blocks(model: nn.Module, blocks: Sequence[nn.Module] = ()) -> bool:
    """Compile each repeated block of ``model`` (or ``blocks``) in place, and return whether there are any.

    A graph of the whole model would be a single autograd node. It would return all gradients together after
    the backward pass, so sums over ranks could not overlap with the backward pass, and all gradients would be
    in memory in addition to the buckets. Blocks of the same kind share a graph, which also compiles faster.
    The gathers of FSDP2 stay between the graphs.
    """
    blocks = blocks or transformer_blocks(model)
    for block in blocks:
        block.compile(dynamic=False)
    return bool(blocks)
