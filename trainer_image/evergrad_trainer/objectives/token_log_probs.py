"""Log probabilities of the tokens of rows, optionally without the logits of all tokens in memory."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.heads import head_arithmetic, head_inputs
from evergrad_trainer.objectives.linear_cross_entropy import find_head, without


class _ChunkedLogProbs(torch.autograd.Function):
    """Computes the logits again in the backward pass, chunk by chunk, so that no logits are stored for it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_tokens: int,
    ) -> torch.Tensor:
        found = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        for begin in range(0, len(hidden), chunk_tokens):
            rows = slice(begin, begin + chunk_tokens)
            logits = functional.linear(hidden[rows], weight).float()
            found[rows] = -functional.cross_entropy(
                logits, labels[rows], ignore_index=IGNORE_INDEX, reduction="none"
            )
        ctx.save_for_backward(hidden, weight, labels)
        ctx.chunk_tokens = chunk_tokens
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        hidden, weight, labels = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        # Sum over chunks in fp32, independent of the dtype of the products. A frozen head has no gradient.
        grad_weight = (
            torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        )
        for begin in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(begin, begin + ctx.chunk_tokens)
            part, targets = hidden[rows], labels[rows]
            is_asked = targets != IGNORE_INDEX
            # d log p(y) / d logits = one-hot - softmax, and zero for ignored labels.
            slope = -functional.linear(part, weight).float().softmax(dim=-1)
            places = torch.arange(len(targets), device=slope.device)
            # An ignored label is not a valid column. Use column 0, because the row becomes zero.
            slope[places, targets.where(is_asked, 0)] += 1
            slope *= (gradient[rows] * is_asked)[:, None]
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.T @ part
        whole = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, whole, None, None


def token_log_probs(
    outputs: torch.Tensor,
    labels: torch.Tensor,
    *,
    head: torch.Tensor | None = None,
    chunk_tokens: int = 0,
) -> torch.Tensor:
    """Return the log probability of each label [b, S], float32, in nats; 0 if the label is IGNORE_INDEX.

    ``outputs``: logits [b, S, V], or with ``head`` [V, H] the hidden states [b, S, H], from which logits are
    computed for ``chunk_tokens`` tokens at a time.
    """
    flat = labels.flatten()
    if head is not None:
        kind, dtype = outputs.device.type, outputs.dtype
        if torch.is_autocast_enabled(kind):
            # Cast here, because the products of the backward pass run outside autocast.
            dtype = torch.get_autocast_dtype(kind)
        hidden, weight = outputs.flatten(0, 1).to(dtype), head.to(dtype)
        found = _ChunkedLogProbs.apply(hidden, weight, flat, chunk_tokens)  # type: ignore[no-untyped-call]
    else:
        logits = outputs.flatten(0, 1).float()
        found = -functional.cross_entropy(
            logits, flat, ignore_index=IGNORE_INDEX, reduction="none"
        )
    return found.view_as(labels)  # type: ignore[no-any-return]


def row_log_probs(
    model: nn.Module,
    input_ids: torch.Tensor,
    labels: torch.Tensor,
    *,
    chunk_tokens: int | None,
) -> torch.Tensor:
    """Return the sum of the log probabilities of each row's labels, [b], in nats.

    ``input_ids`` and ``labels``: [b, S], already shifted. The model is called once. ``chunk_tokens``: maximum
    number of tokens whose logits exist at a time; None: all tokens. Raises ValueError if ``chunk_tokens`` is
    given and the model's logits are not only a linear layer.
    """
    if chunk_tokens is None:
        outputs: Any = model(input_ids=input_ids, use_cache=False)
        return token_log_probs(outputs.logits, labels).sum(dim=1)
    head = find_head(model)
    with without(head):
        outputs = model(input_ids=input_ids, use_cache=False)
    with head_arithmetic(head):
        hidden, weight = head_inputs(head, outputs.logits)
        found = token_log_probs(hidden, labels, head=weight, chunk_tokens=chunk_tokens)
    return found.sum(dim=1)
