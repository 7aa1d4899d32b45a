"""Recomputation of activations block by block: less memory for the backward pass, the same bits."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from evergrad_trainer.base import torch_private

if TYPE_CHECKING:
    from torch.utils.checkpoint import CheckpointPolicy

_ATEN = torch.ops.aten
KEPT: frozenset[Any] = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operations whose results ``selective`` keeps: matrix products and fused attention, nearly all the
arithmetic of a block. Batched products are not among them, since those of plain attention are as large as
the square of the sequence."""


def recompute(blocks: Sequence[nn.Module], *, is_selective: bool) -> None:
    """Make each block compute its inside again in the backward pass, in place.

    ``is_selective``: results of :data:`KEPT` stay in memory, and only what is cheap is computed again.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    for block in blocks:
        # The method and not the module is wrapped: compilation then finds the recomputation inside of its
        # graph, and FSDP2's gathers stay outside of both.
        options: dict[str, Any] = {"use_reentrant": False}
        if is_selective:
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, _choose_policy
            )
        block.forward = _recomputed(block.forward, functools.partial(checkpoint, **options))


def _recomputed(
    plain: Callable[..., Any], checkpoint: Callable[..., Any]
) -> Callable[..., Any]:
    """Return ``plain`` with its inside computed again, as a function of this file.

    The compiler begins with the first frame that is not torch's own. With torch's function as the block's
    method it met none before ``checkpoint``, which it does not enter, and compiled nothing.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        return checkpoint(plain, *arguments, **named)

    return forward


def _choose_policy(
    context: object, operation: object, *args: object, **kwargs: object
) -> "CheckpointPolicy":
    """Decide what becomes of one operation's result: a callback of torch's selective checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy

    is_kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def offload_inputs(blocks: Sequence[nn.Module]) -> None:
    """Make the inputs that recomputed blocks keep wait for the backward pass in host memory, in place.

    Called after compilation: the hooks stand around a block's graph, which would not take them in.
    """
    for block in blocks:
        torch_private.wrap_call(
            block, lambda call: functools.partial(_call_with_inputs_on_host, call)
        )


def _call_with_inputs_on_host(
    call: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a block while its inputs are saved in host memory.

    Its inputs are the positional tensors that have a gradient: what all blocks share, such as masks and
    tables of angles, would be copied once for each, and what is given by name torch's checkpoint holds
    without saving it. Storages are compared and not tensors, since FSDP2 and graphs save views of what they
    are called with.
    """
    inputs = {
        one.untyped_storage().data_ptr()
        for one in arguments
        if isinstance(one, torch.Tensor) and one.requires_grad
    }

    # A graph also saves the block's weights here, which stay where they are.
    def leave(saved: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        is_input = saved.untyped_storage().data_ptr() in inputs
        return saved.device, copy_to_host(saved) if is_input else saved

    def bring_back(left: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = left
        # On the stream that the copy to the host was on, behind it.
        return tensor.to(device, non_blocking=True)

    with saved_tensors_hooks(leave, bring_back):
        return call(*arguments, **named)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in host memory: of a tensor on an accelerator one that is pinned, and that is complete
    once its stream has come this far."""
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    # A graph was compiled for the strides of what it saves: a view with gaps stays as it is.
    return (
        copy.copy_(tensor, non_blocking=True)
        if copy.stride() == tensor.stride()
        else tensor
    )
