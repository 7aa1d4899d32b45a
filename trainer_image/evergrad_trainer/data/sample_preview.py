"""Shows samples of a step in readable form: the origin and the text of each sample."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

import torch

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS, POSITIONS
from evergrad_trainer.data.tokenizers import TextTokenizer


def show_samples(
    stream: TrainingStream,
    tokenizer: TextTokenizer,
    *,
    count: int,
    asked_by: str,
    step: int | None = None,
) -> list[dict[str, Any]]:
    """Return at most ``count`` samples of ``step``, by default of the first step, as JSON values.

    A sample has its origin, its texts and its number of learned tokens. A pair has two texts. ``asked_by``:
    the command-line option, for messages. Raises ConfigurationError if batches contain no tokens, and
    DataError if a file cannot be read.
    """
    first = stream.first_step if step is None else step
    batches = (stream.slot(first, slot) for slot in range(stream.slots_per_step))
    samples = ((batch, row) for batch in batches for row in range(len(batch.samples)))
    shown = []
    for batch, row in islice(samples, count):
        if INPUT_IDS not in batch.tensors:
            what, why = "has no text to show", f"its batches contain no {INPUT_IDS}"
            raise ConfigurationError(
                Problem(asked_by, f"the recipe {what}", why, "Leave it out")
            )
        one: dict[str, Any] = {
            "sample": stream.describe(batch.samples[row]),
            "texts": [tokenizer.decode(line) for line in _lines_of(batch.tensors, row)],
        }
        if LABELS in batch.tensors:
            one["learnedTokens"] = int((batch.tensors[LABELS][row] != IGNORE_INDEX).sum())
        shown.append(one)
    return shown


def _lines_of(tensors: Mapping[str, torch.Tensor], row: int) -> list[list[int]]:
    """Return the token ids of a sample without padding: one list, or two lists for a pair."""
    ids = tensors[INPUT_IDS][row]
    is_own = torch.ones_like(ids, dtype=torch.bool)
    labels, positions = (
        tensors[name][row] if name in tensors else None for name in (LABELS, POSITIONS)
    )
    # Padding has the id 0, no label, and the position 0.
    if labels is not None and labels.shape == ids.shape:
        is_own = (ids != 0) | (labels != IGNORE_INDEX)
        if positions is not None and positions.shape == ids.shape:
            is_own |= positions != 0

    # A pair has two rows. The last dimension is always the length of a row.
    length = ids.shape[-1]
    lines = []
    for line, own in zip(ids.reshape(-1, length), is_own.reshape(-1, length), strict=True):
        places = own.nonzero()
        lines.append(line[: int(places[-1]) + 1 if len(places) else 0].tolist())
    return lines
