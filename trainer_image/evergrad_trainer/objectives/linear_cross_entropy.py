"""Token losses of a linear head, computed in chunks, without the logits of all tokens in memory."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

PLAIN_HEADS = frozenset({"gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3"})
"""Model types of transformers whose logits are only a linear layer of the last hidden state."""


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients together with the loss, chunk by chunk, so that no logits are stored for the
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
        # Sum over chunks in fp32, independent of the dtype of the products. A frozen head has no gradient.
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
            # d loss / d logits = softmax - one-hot, and zero for ignored labels.
            is_asked = targets != ignore_index
            slope = logits.softmax(dim=-1)
            positions = torch.arange(len(targets), device=slope.device)
            # An ignored label is not a valid column. Use column 0, because the row becomes zero.
            slope[positions, targets.where(is_asked, 0)] -= 1
            slope *= is_asked[:, None]
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ part
        # Store at most two tensors of the size of the inputs, but no logits.
        sums = None
        if grad_weight is not None:
            sums = grad_weight.to(kept_type(weight))
        ctx.save_for_backward(grad_hidden, sums)
        ctx.dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # The loss is a sum, so the incoming gradient scales both gradients.
        (slope,) = gradients
        grad_hidden, grad_weight = ctx.saved_tensors
        scaled_hidden = (
            None if grad_hidden is None else grad_hidden * slope.to(grad_hidden.dtype)
        )
        scaled_weight = None if grad_weight is None else (grad_weight * slope).to(ctx.dtype)
        return scaled_hidden, scaled_weight, None, None, None


def kept_type(weight: torch.Tensor) -> torch.dtype:
    """Return the dtype of a gradient of ``weight`` until its loss is divided by the weight of a step.

    The largest fp16 number is 65504, which a sum over the tokens of a micro-batch can exceed at any scale.
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
    """Return the sum of token losses, a float32 scalar, of ``hidden`` [b, S, H] times ``weight`` [V, H]
    against ``labels`` [b, S].

    The logits of at most ``chunk_tokens`` tokens exist at a time. Apart from the order of additions, the sum
    and its gradients equal ``cross_entropy(linear(hidden, weight))`` (the method of Liger's fused loss).
    """
    hidden, labels = hidden.flatten(0, 1), labels.flatten()
    return _ChunkedLoss.apply(hidden, weight, labels, chunk_tokens, ignore_index)  # type: ignore[no-any-return, no-untyped-call]


def find_head(model: nn.Module) -> nn.Linear:
    """Return the linear layer that computes the logits from the last hidden states.

    Raises ValueError if the model's logits are not only a linear layer.
    """
    config = getattr(model, "config", None)
    name = str(getattr(config, "model_type", type(model).__name__))
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    # Decide by the model type, because a model may scale or cap its logits after an ordinary linear layer.
    is_plain = name in PLAIN_HEADS and getattr(head, "bias", None) is None
    if not is_plain or not isinstance(head, nn.Linear):
        raise ValueError(f"the head of {name} is not plain")
    return head


@contextlib.contextmanager
def without(head: nn.Linear) -> Iterator[None]:
    """Inside the block, the model returns its last hidden states instead of logits.

    The head stays a part of the model, so that FSDP2 gathers it in the forward pass.
    """
    head.forward = lambda input: input  # type: ignore[method-assign]
    try:
        yield
    finally:
        del head.forward
