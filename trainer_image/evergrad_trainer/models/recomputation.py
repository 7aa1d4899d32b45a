"""Recomputation of activations block by block: less memory for the backward pass, the same bits."""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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


def _recomputed(plain: Callable[..., Any], checkpoint: Callable[..., Any]) -> Callable[..., Any]:
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
