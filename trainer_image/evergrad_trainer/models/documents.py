"""Separates several documents in one row, and lists the models that support it."""

from collections.abc import Iterator
from typing import Any, Final

import torch

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Data
from evergrad_trainer.models.experts import router_coefficient

MASKED: Final = frozenset(
    {"gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3"}
)
"""Model types of transformers that use the given attention mask and the given positions. A test checks each
type."""


def keep_apart(
    position_ids: torch.Tensor, *, with_mask: bool = True
) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for rows of several documents: positions and an attention mask.

    ``position_ids``: [b, S]; each document starts at position 0. The mask is bool [b, 1, S, S], and true if a
    token attends to another token. ``with_mask=False`` is for a model with a router loss, which does not
    accept such a mask; transformers then derives the same mask from the positions.
    """
    if not with_mask:
        return {"position_ids": position_ids}
    # Pass the whole mask if possible, because versions of transformers derive masks from positions in
    # different ways.
    documents = (position_ids == 0).cumsum(dim=1)
    is_same = documents[:, None, :, None] == documents[:, None, None, :]
    length = position_ids.shape[1]
    is_before = torch.ones(
        length, length, dtype=torch.bool, device=position_ids.device
    ).tril()
    return {"position_ids": position_ids, "attention_mask": is_same & is_before}


def why_not_apart(config: Any, sequence_length: int) -> str | None:
    """Return the reason why this model cannot separate the documents of a row; None if it can."""
    text = config.get_text_config()
    name = str(config.model_type)
    if name not in MASKED:
        return (
            f"the attention of {name} is not known to keep the documents of a sample apart"
        )
    # Some configurations have a window and a separate switch that enables it.
    window = getattr(text, "sliding_window", None)
    if (
        window is not None
        and getattr(text, "use_sliding_window", True)
        and window < sequence_length
    ):
        return (
            f"attention of {name} sees {window} tokens here, and the mask that keeps documents apart "
            "would replace that limit"
        )
    return None


def check_packing(
    config: Any, data: Data, *, reads_rows: bool, has_pairs: bool = False
) -> Iterator[Problem]:
    """Yield problems if the model does not support the packing of samples that ``data.packing`` selects."""
    where = "spec.training.data.packing"
    if data.packing == "documents":
        why = why_not_apart(config, data.sequence_length)
        if why is not None:
            instead = "none" if reads_rows else "concatenate"
            yield Problem(
                where,
                "documents cannot be kept apart in this model",
                why,
                f"Set data.packing: {instead}, or use one of {', '.join(sorted(MASKED))}",
            )
    elif data.packing == "none" and reads_rows and router_coefficient(config):
        without = "router_aux_loss_coef: 0 in the model's configuration to train without it"
        can_pack = not has_pairs and why_not_apart(config, data.sequence_length) is None
        remedy = (
            f"Set data.packing: documents, or {without}" if can_pack else f"Set {without}"
        )
        yield Problem(
            where,
            f"none cannot be combined with the router loss of {config.model_type}",
            "it is a mean over all places of a sample, most of which are padding after the row",
            remedy,
        )
