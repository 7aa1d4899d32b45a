"""Recomputes activations block by block: the backward pass needs less memory and gives the same bits."""

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
"""Operations whose results ``selective`` keeps: matrix products and fused attention.

They are nearly all the arithmetic of a block. Batched products are not included, because the results in
attention without a fused kernel grow with the square of the sequence length.
"""


def recompute(blocks: Sequence[nn.Module], *, is_selective: bool) -> None:
    """Make each block recompute its activations in the backward pass, in place.

    ``is_selective``: keep the results of :data:`KEPT` in memory, and recompute only cheap operations.
    """
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    for block in blocks:
        # Wrap the method and not the module, so that recomputation is inside the compiled graph, and the
        # gathers of FSDP2 stay outside of both.
        options: dict[str, Any] = {"use_reentrant": False}
        if is_selective:
            options["context_fn"] = functools.partial(
                create_selective_checkpoint_contexts, _choose_policy
            )
        block.forward = _recomputed(block.forward, functools.partial(checkpoint, **options))


def _recomputed(
    plain: Callable[..., Any], checkpoint: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function, defined in this file, that calls ``plain`` with recomputation.

    The compiler starts at the first frame outside of torch. If the block's method were a function of torch,
    the compiler would find no such frame before ``checkpoint``, which it does not enter, and compile nothing.
    """

    def forward(*arguments: Any, **named: Any) -> Any:
        return checkpoint(plain, *arguments, **named)

    return forward


def _choose_policy(
    context: object, operation: object, *args: object, **kwargs: object
) -> "CheckpointPolicy":
    """Decide whether an operation's result is kept. A callback of torch's selective checkpointing."""
    from torch.utils.checkpoint import CheckpointPolicy

    is_kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def offload_inputs(blocks: Sequence[nn.Module]) -> None:
    """Keep the inputs of recomputed blocks in host memory until the backward pass, in place.

    Call this after compilation, so that the hooks are around the graph of a block: a graph cannot include
    them.
    """
    for block in blocks:
        torch_private.wrap_call(
            block, lambda call: functools.partial(_call_with_inputs_on_host, call)
        )


def _call_with_inputs_on_host(
    call: Callable[..., Any], *arguments: Any, **named: Any
) -> Any:
    """Call a block, and save its inputs in host memory.

    Only positional tensors with a gradient are copied. Tensors that all blocks share, such as masks and
    tables of angles, would be copied for each block, and torch's checkpoint holds keyword arguments without
    saving them. The function compares storages and not tensors, because FSDP2 and graphs save views of their
    inputs.
    """
    inputs = {
        one.untyped_storage().data_ptr()
        for one in arguments
        if isinstance(one, torch.Tensor) and one.requires_grad
    }

    # A graph also saves the block's weights here. They are not copied.
    def leave(saved: torch.Tensor) -> tuple[torch.device, torch.Tensor]:
        is_input = saved.untyped_storage().data_ptr() in inputs
        return saved.device, copy_to_host(saved) if is_input else saved

    def bring_back(left: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
        device, tensor = left
        # This copy runs on the same stream as the copy to the host, and so after it.
        return tensor.to(device, non_blocking=True)

    with saved_tensors_hooks(leave, bring_back):
        return call(*arguments, **named)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor in host memory.

    For a tensor on an accelerator, the copy is pinned and asynchronous: it is complete when the stream has
    reached this point. A view with gaps is returned without copying.
    """
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type != "cpu")
    # Do not copy if the strides would change, because a graph is compiled for the strides of saved tensors.
    return (
        copy.copy_(tensor, non_blocking=True)
        if copy.stride() == tensor.stride()
        else tensor
    )
