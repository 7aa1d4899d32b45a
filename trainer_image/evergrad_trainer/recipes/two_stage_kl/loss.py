"""The sums of one micro-batch: token losses, alone or together with the losses and divergence of a
reference."""

from typing import Any

import torch
from torch import nn

from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS
from evergrad_trainer.models.experts import router_coefficient
from evergrad_trainer.models.heads import head_arithmetic, head_inputs
from evergrad_trainer.objectives.causal_lm import causal_lm_loss
from evergrad_trainer.objectives.linear_cross_entropy import find_head, without
from evergrad_trainer.objectives.linear_kl import KlSums, Penalty, linear_kl
from evergrad_trainer.task import Tensors


def sum_losses(model: nn.Module, batch: Tensors, *, chunk_tokens: int) -> torch.Tensor:
    """Return the sum of token losses in nats."""
    loss_sum = causal_lm_loss(model, chunk_tokens=chunk_tokens)
    return loss_sum(batch[INPUT_IDS], batch[LABELS])


def sum_divergences(
    model: nn.Module,
    reference: nn.Module,
    batch: Tensors,
    *,
    penalty: Penalty,
    chunk_tokens: int,
) -> KlSums:
    """Return the sums of losses and penalties. Logits of both models exist for one chunk of tokens at a
    time."""
    head, other_head = find_head(model), find_head(reference)
    # Run the reference first: it needs no gradients, so its activations are freed before the model runs.
    with torch.no_grad(), without(other_head):
        other: Any = reference(input_ids=batch[INPUT_IDS], use_cache=False)
    with without(head):
        outputs: Any = model(input_ids=batch[INPUT_IDS], use_cache=False)
    with head_arithmetic(head):
        sums = linear_kl(
            *head_inputs(head, outputs.logits),
            head_inputs(other_head, other.logits),
            batch[LABELS],
            penalty=penalty,
            chunk_tokens=chunk_tokens,
        )
    config: Any = getattr(model, "config", None)
    coefficient = 0.0 if config is None else router_coefficient(config)
    if coefficient and model.training:
        # Multiply the mean over the tokens by their number, because the other values are sums.
        num_tokens = (batch[LABELS] != IGNORE_INDEX).sum()
        router = coefficient * outputs.aux_loss.float() * num_tokens
        sums = sums._replace(total=sums.total + router)
    return sums
