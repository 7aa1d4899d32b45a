"""Changes a model's embeddings: adds rows for more token ids, and adds noise in training."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def padded_size(rows: int, *, multiple_of: int) -> int:
    """Return the smallest multiple that is not below ``rows``. For example, 50257 and 8 give 50264."""
    return -(-rows // multiple_of) * multiple_of


def resize_embeddings(model: "PreTrainedModel", rows: int) -> None:
    """Resize the embedding tables of ``model`` to ``rows`` rows, in place. New rows are the mean of old rows.

    The result has the same bits in every process: no random numbers remain, and the means are summed in a
    fixed order.
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
            # Use numpy, which sums in one thread: the order of a sum in torch depends on its thread count.
            mean = tensor[:before].detach().double().numpy().sum(axis=0) / before
            tensor[before:] = torch.as_tensor(mean).to(tensor.dtype)


def add_noise(model: "PreTrainedModel", alpha: float) -> None:
    """Add uniform noise to the embeddings of ``model`` in training mode (NEFTune, arXiv 2310.05914).

    The noise of each element is at most alpha / sqrt(S · H), for S tokens per sample and hidden size H. It is
    drawn from the generator that is seeded for each step and slot, so it is the same for every world size.
    """

    def disturb(module: nn.Module, _inputs: Any, looked_up: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return looked_up
        length, width = looked_up.shape[-2:]
        most = alpha / math.sqrt(length * width)
        return looked_up + torch.empty_like(looked_up).uniform_(-most, most)

    model.get_input_embeddings().register_forward_hook(disturb)
