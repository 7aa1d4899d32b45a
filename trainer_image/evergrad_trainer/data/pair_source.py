"""Items that are pairs of rows: the two completions of a prompt, each in a separate row."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from evergrad_trainer.data.batch import Rows
from evergrad_trainer.data.row_source import RowReader
from evergrad_trainer.data.token_source import IGNORE_INDEX, INPUT_IDS, LABELS


class PairSource:
    """Items with ``input_ids`` and ``labels``, int64 [items, 2, S]: the chosen row, then the rejected row.

    The two rows are one item, so that they are never separated by micro-batches, the sample order or a change
    of the world. A row of n tokens takes n - 1 positions, as in ``RowSource``, and is padded at its end. The
    weight of an item is 1.
    """

    fill: Mapping[str, int] = {INPUT_IDS: 0, LABELS: IGNORE_INDEX}

    def __init__(self, reader: RowReader, *, sequence_length: int, vocab_size: int) -> None:
        """``vocab_size``: the vocabulary size of the tokenizer, which is also the separator id of a pair."""
        # Include the sequence length, because it changes the items, but not the prepared pairs.
        said = [reader.source.fingerprint, "pairs", sequence_length]
        self.fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        self._reader = reader
        self._length = sequence_length
        self._between = vocab_size

    def __len__(self) -> int:
        return len(self._reader)

    def read(self, items: Sequence[int]) -> Rows:
        """Read items. Raises IndexError if an item does not exist, and DataError if a file cannot be read."""
        shape = (len(items), 2, self._length)
        inputs = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        for at, item in enumerate(items):
            both = self._reader.read(item)
            # The separator is not an id of the tokenizer, so it occurs in neither row.
            middle = int(np.flatnonzero(both.ids == self._between)[0])
            for side, part in enumerate((slice(middle), slice(middle + 1, None))):
                ids, marks = both.ids[part], both.marks[part]
                size = len(ids) - 1
                inputs[at, side, :size] = ids[:-1]
                labels[at, side, :size] = np.where(marks[1:], ids[1:], IGNORE_INDEX)
        tensors = {INPUT_IDS: torch.from_numpy(inputs), LABELS: torch.from_numpy(labels)}
        return Rows(tensors, weight=len(items))

    def describe(self, item: int) -> str:
        """Return the file and line of a pair."""
        return self._reader.describe([item])
