"""Changes to a model's embeddings: more rows for more token ids, and noise while training."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def padded_size(rows: int, *, multiple_of: int) -> int:
    """The least multiple that is not below ``rows``."""
    return -(-rows // multiple_of) * multiple_of


def resize_embeddings(model: "PreTrainedModel", rows: int) -> None:
    """Give the tables of ``model`` that many rows, in place; a new row is the mean of those before.

    The same bits in every process: no random number is left, and the means are sums in one order.
    """
    table: Any = model.get_input_embeddings()
    before = table.weight.shape[0]
    model.resize_token_embeddings(rows, mean_resizing=False)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tensors = [table.weight]
    if head is not None and head.weight is not tensors[0]:
        tensors.append(head.weight)
    if head is not None and getattr(head, "bias", None) is not None:
        tensors.append(head.bias)
    with torch.no_grad():
        for tensor in tensors:
            # By numpy, in one thread: torch's threads would add in an order that their number decides.
            mean = tensor[:before].detach().double().numpy().sum(axis=0) / before
            tensor[before:] = torch.as_tensor(mean).to(tensor.dtype)


def add_noise(model: "PreTrainedModel", alpha: float) -> None:
    """Add uniform noise to what ``model`` looks up while it trains (NEFTune, arXiv 2310.05914).

    Each element gets at most alpha / sqrt(S · H): S tokens of a sample, H wide. It is drawn from the
    generator that the step keys by step and slot, so that it is the same in a world of any size.
    """

    def disturb(module: nn.Module, _inputs: Any, looked_up: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return looked_up
        length, width = looked_up.shape[-2:]
        most = alpha / math.sqrt(length * width)
        return looked_up + torch.empty_like(looked_up).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(disturb)
