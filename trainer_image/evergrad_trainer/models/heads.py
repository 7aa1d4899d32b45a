"""An output head that computes in fp32, independent of the precision of the rest of the model."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import ModelError


class FullPrecisionHead(nn.Linear):
    """A linear layer that computes its product in fp32, also under autocast and with bf16 weights."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the logits in fp32."""
        with torch.autocast(input.device.type, enabled=False):
            # torch declares the bias as a tensor, but it is None for a layer without a bias.
            bias: Any = self.bias
            own = None if bias is None else bias.float()
            return functional.linear(input.float(), self.weight.float(), own)


def make_full_precision(model: nn.Module) -> None:
    """Make the model's output head compute in fp32, in place. Its weights do not change.

    Raises ModelError if the head is not a linear layer.
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
    # Replace the class and not the layer, so that names, shared weights and references stay valid.
    head.__class__ = FullPrecisionHead


def head_inputs(head: nn.Linear, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and weights in the types of the head's product, for losses computed in chunks."""
    if isinstance(head, FullPrecisionHead):
        return hidden.float(), head.weight.float()
    return hidden, head.weight


def head_arithmetic(head: nn.Linear) -> AbstractContextManager[object]:
    """Return the context in which to compute the product of :func:`head_inputs`."""
    if isinstance(head, FullPrecisionHead):
        return torch.autocast(head.weight.device.type, enabled=False)
    return nullcontext()
