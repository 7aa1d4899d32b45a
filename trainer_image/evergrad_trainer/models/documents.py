"""Several documents in one row that do not see each other, and the models that can keep them apart."""

from typing import Any, Final

import torch

MASKED: Final = frozenset({"gpt2", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen3"})
"""transformers' model types whose attention takes the mask that is given and whose places are the positions
that are given, which a test shows of each."""


def keep_apart(
    position_ids: torch.Tensor, *, with_mask: bool = True
) -> dict[str, torch.Tensor]:
    """Arguments of a model for rows [b, S] of documents, each of which begins at position 0: positions, and a
    mask [b, 1, S, S] that is true where a token sees another.

    ``with_mask=False``: for a model that computes a router loss, which takes no such mask; transformers makes
    the same one of the positions.
    """
    if not with_mask:
        return {"position_ids": position_ids}
    # Given whole where it can be: what is left to be found out from positions differs between versions.
    documents = (position_ids == 0).cumsum(dim=1)
    is_same = documents[:, None, :, None] == documents[:, None, None, :]
    length = position_ids.shape[1]
    is_before = torch.ones(length, length, dtype=torch.bool, device=position_ids.device).tril()
    return {"position_ids": position_ids, "attention_mask": is_same & is_before}


def why_not_apart(config: Any, sequence_length: int) -> str | None:
    """Why documents of a row cannot be kept apart in this model; None where they can."""
    text = config.get_text_config()
    name = str(config.model_type)
    if name not in MASKED:
        return f"the attention of {name} is not known to keep the documents of a sample apart"
    # Some have the number in their configuration and a switch beside it.
    window = getattr(text, "sliding_window", None)
    if (
        window is not None
        and getattr(text, "use_sliding_window", True)
        and window < sequence_length
    ):
        return (
            f"attention of {name} sees {window} tokens here, and the mask that keeps documents apart would "
            "take the place of that limit"
        )
    return None
