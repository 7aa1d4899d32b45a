"""The output head in fp32, whatever the rest of the model computes in."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import ModelError


class FullPrecisionHead(nn.Linear):
    """A linear layer whose product is made in fp32, also under autocast and of bf16 weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits in fp32."""
        with torch.autocast(input.device.type, enabled=False):
            # torch declares a tensor, also for a layer without one.
            bias: Any = self.bias
            own = None if bias is None else bias.float()
            return functional.linear(input.float(), self.weight.float(), own)


def make_full_precision(model: nn.Module) -> None:
    """Make the model's output head compute in fp32, in place; its weights stay as they are.

    Raises ModelError for a model whose head is no linear layer.
    """
    find: Any = getattr(model, "get_output_embeddings", None)
    head = None if find is None else find()
    if type(head) is not nn.Linear:
        raise ModelError(
            Problem(
                "spec.training.model.headPrecision",
                f"a {type(model).__name__} has no linear layer as its output head",
                "only the product of such a layer is known",
                "Leave headPrecision out, or set runtime.precision: fp32",
            )
        )
    # The class and not the layer: names, shared weights and whatever refers to it stay.
    head.__class__ = FullPrecisionHead


def head_inputs(head: nn.Linear, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weights as the head's product takes them, for whoever makes it in chunks."""
    if isinstance(head, FullPrecisionHead):
        return hidden.float(), head.weight.float()
    return hidden, head.weight


def head_arithmetic(head: nn.Linear) -> AbstractContextManager[object]:
    """Around the product of :func:`head_inputs`."""
    if isinstance(head, FullPrecisionHead):
        return torch.autocast(head.weight.device.type, enabled=False)
    return nullcontext()
