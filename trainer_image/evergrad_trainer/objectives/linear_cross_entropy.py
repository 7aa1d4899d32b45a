"""Token losses of a linear head without the logits of all tokens in memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

PLAIN_HEADS = frozenset({"gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3"})
"""transformers' model types whose logits are a linear layer of the last hidden state, and nothing more."""


class _ChunkedLoss(torch.autograd.Function):
    """Gradients are computed with the loss, chunk by chunk, so that no logits are kept for the
    backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
        ignore_index: int,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if hidden.requires_grad else None
        # Summed over chunks in fp32, whatever the products' type is. A head that is frozen has none.
        grad_weight = None
        if weight.requires_grad:
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for begin in range(0, len(hidden), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            part, targets = hidden[rows], labels[rows]
            logits = functional.linear(part, weight).float()
            total += functional.cross_entropy(
                logits, targets, ignore_index=ignore_index, reduction="sum"
            )
            if grad_hidden is None and grad_weight is None:
                continue
            # d loss / d logits = softmax - one-hot, and zero where no token is asked for.
            is_asked = targets != ignore_index
            slope = logits.softmax(dim=-1)
            positions = torch.arange(len(targets), device=slope.device)
            # A target that is to be ignored is no column: any one will do, since the row becomes zero.
            slope[positions, targets.where(is_asked, 0)] -= 1
            slope *= is_asked[:, None]
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ part
        # At most two tensors of the size of the inputs, and no logits.
        sums = None
        if grad_weight is not None:
            sums = grad_weight.to(kept_type(weight))
        ctx.save_for_backward(grad_hidden, sums)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The loss is a sum: what comes from above scales both.
        (slope,) = gradients
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = (
            None if grad_hidden is None else grad_hidden * slope.to(grad_hidden.dtype)
        )
        scaled_weight = None if grad_weight is None else (grad_weight * slope).to(ctx.dtype)
        return scaled_hidden, scaled_weight, None, None, None


def kept_type(weight: torch.Tensor) -> torch.dtype:
    """The type in which a gradient of ``weight`` is kept until its loss is divided by what a step weighs.

    fp16 ends at 65504, which a sum over the tokens of a micro-batch may pass, whatever the loss's scale is.
    """
    return torch.float32 if weight.dtype == torch.float16 else weight.dtype


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int,
    ignore_index: int,
) -> torch.Tensor:
    """Sum of token losses, a float32 scalar: ``hidden`` [b, S, H] times ``weight`` [V, H] against ``labels``
    [b, S].

    Logits of ``chunk_tokens`` tokens exist at a time. The sum and its gradients are those of
    ``cross_entropy(linear(hidden, weight))`` but for the order of additions (the method of Liger's fused
    loss).
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    return _ChunkedLoss.apply(hidden, weight, labels, chunk_tokens, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def find_head(model: nn.Module) -> nn.Linear:
    """The layer that makes logits of the last hidden states.

    Raises ValueError for a model whose logits are more than that.
    """
    config = getattr(model, "config", None)
    name = str(getattr(config, "model_type", type(model).__name__))
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    # By name: a model may scale its logits, or cap them, behind a layer that looks like any other.
    is_plain = name in PLAIN_HEADS and getattr(head, "bias", None) is None
    if not is_plain or not isinstance(head, nn.Linear):
        raise ValueError(f"the head of {name} is not plain")
    return head


@contextlib.contextmanager
def without(head: nn.Linear) -> Iterator[None]:
    """While this lasts, the model gives its last hidden states in the place of logits.

    The head stays where it is: FSDP2 gathers it with the model, whose forward pass it takes part in.
    """
    head.forward = lambda input: input  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
