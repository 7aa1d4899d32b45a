"""Samples of the first step as people read them: the place that each comes from, and its text."""

from itertools import islice
from typing import Any

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS
from evergrad_trainer.data.tokenizers import TextTokenizer


def show_samples(
    stream: TrainingStream,
    tokenizer: TextTokenizer,
    *,
    count: int,
    asked_by: str,
    step: int | None = None,
) -> list[dict[str, Any]]:
    """At most ``count`` samples of ``step``, by default the first: place, text and number of learned tokens,
    as JSON values.

    A sample of two rows, a pair, has two texts. ``asked_by``: the option, for messages. Raises
    ConfigurationError where batches hold no tokens, and DataError.
    """
    first = stream.first_step if step is None else step
    batches = (stream.slot(first, slot) for slot in range(stream.slots_per_step))
    samples = ((batch, row) for batch in batches for row in range(len(batch.samples)))
    shown = []
    for batch, row in islice(samples, count):
        if INPUT_IDS not in batch.tensors:
            what, why = "has no text to show", f"its batches hold no {INPUT_IDS}"
            raise ConfigurationError(
                Problem(asked_by, f"the recipe {what}", why, "Leave it out")
            )
        # A pair shows both rows; the length of a row comes last in any case.
        ids = batch.tensors[INPUT_IDS][row]
        one: dict[str, Any] = {
            "sample": stream.describe(batch.samples[row]),
            "texts": [
                tokenizer.decode(line) for line in ids.reshape(-1, ids.shape[-1]).tolist()
            ],
        }
        if LABELS in batch.tensors:
            one["learnedTokens"] = int((batch.tensors[LABELS][row] != IGNORE_INDEX).sum())
        shown.append(one)
    return shown
