"""Next-token prediction: the sum of token losses of one micro-batch."""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from evergrad_trainer.data.stream import IGNORE_INDEX

LossSum = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def causal_lm_loss(model: nn.Module) -> LossSum:
    """A function (input_ids [b, S], labels [b, S], already shifted) → sum of token losses in nats, a float32 scalar.

    The sum, not the mean: the step divides by its global number of valid tokens, so that the result depends neither on
    the number of slots nor on who computes them.
    """

    def loss_sum(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=input_ids, use_cache=False).logits
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
        )

    return loss_sum
