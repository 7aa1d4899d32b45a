"""Next-token prediction: the sum of token losses of one micro-batch."""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.models.documents import keep_apart
from evergrad_trainer.models.experts import has_router_loss, router_coefficient
from evergrad_trainer.models.heads import head_arithmetic, head_inputs
from evergrad_trainer.objectives.linear_cross_entropy import (
    find_head,
    linear_cross_entropy,
    without,
)


class LossSum(Protocol):
    """A function of (input_ids [b, S], labels [b, S], already shifted, position_ids [b, S] or None). It
    returns the sum of token losses in nats, a float32 scalar."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


def causal_lm_loss(model: nn.Module, *, chunk_tokens: int | None = None) -> LossSum:
    """Return a function that computes the sum of token losses.

    With positions, a row contains several documents; each document begins at position 0 and attends only to
    itself.

    The result is a sum instead of a mean: the step divides by its global number of valid tokens, so that the
    result does not depend on the number of slots or on the rank that computes each. In training, it includes
    the router loss of a mixture of experts, weighted by the configuration's own coefficient; an evaluation
    includes only the token losses. ``chunk_tokens``: maximum number of tokens whose logits exist at a time,
    see :mod:`.linear_cross_entropy`.
    """

    config: Any = getattr(model, "config", None)
    coefficient = 0.0 if config is None else router_coefficient(config)
    # A router loss with weight 0 is computed as well.
    takes_mask = config is None or not has_router_loss(config)
    head = None if chunk_tokens is None else find_head(model)

    def loss_sum(
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        apart = (
            {} if position_ids is None else keep_apart(position_ids, with_mask=takes_mask)
        )
        with nullcontext() if head is None else without(head):
            outputs = model(input_ids=input_ids, use_cache=False, **apart)
        if head is not None and chunk_tokens is not None:
            with head_arithmetic(head):
                loss = linear_cross_entropy(
                    *head_inputs(head, outputs.logits),
                    labels,
                    chunk_tokens=chunk_tokens,
                    ignore_index=IGNORE_INDEX,
                )
        else:
            logits = outputs.logits.flatten(0, 1).float()
            loss = functional.cross_entropy(
                logits, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
            )
        if coefficient and model.training:
            # Multiply the mean over the tokens by their number, because the other value is a sum.
            loss = (
                loss
                + coefficient * outputs.aux_loss.float() * (labels != IGNORE_INDEX).sum()
            )
        return loss

    return loss_sum
