"""Windows of a token sequence as items: every token predicted from those before it."""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch

from evergrad_trainer.data.batch import Rows
from evergrad_trainer.data.prepared import PreparedSource, TokenSequence
from evergrad_trainer.data.token_files import TokenReader, read_documents

IGNORE_INDEX: Final = -100
"""The label of positions where nothing is learned."""
INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"


class TokenSource:
    """``input_ids`` and ``labels``, int64 [items, S]; labels are shifted by one, and IGNORE_INDEX where
    nothing is learned.

    An item weighs as many tokens as carry a label. ``sequence`` is the part of ``source`` to read: its
    training tokens, or what is held out of them.
    """

    fill: Mapping[str, int] = {INPUT_IDS: 0, LABELS: IGNORE_INDEX}

    def __init__(
        self,
        source: PreparedSource,
        sequence: TokenSequence,
        *,
        sequence_length: int,
        end_of_document: int,
    ) -> None:
        self.fingerprint = source.fingerprint
        self._file_name = source.path.name
        self._reader = TokenReader(
            sequence, sequence_length=sequence_length, end_of_document=end_of_document
        )

    def __len__(self) -> int:
        return self._reader.num_windows

    def read(self, items: Sequence[int]) -> Rows:
        """Read items. Raises IndexError, and DataError if a file cannot be read any more."""
        windows = self._reader.read(items)
        length = windows.tokens.shape[1] - 1
        # A copy in any case: of one row the slice is contiguous already, and marking its labels would change
        # the inputs.
        labels = windows.tokens[:, 1:].copy()
        valid = np.minimum(windows.lengths - 1, length)
        if int(valid.min()) < length:
            labels[np.arange(length) >= valid[:, None]] = IGNORE_INDEX
        inputs = np.ascontiguousarray(windows.tokens[:, :-1])
        tensors = {INPUT_IDS: torch.from_numpy(inputs), LABELS: torch.from_numpy(labels)}
        return Rows(tensors, weight=int(valid.sum()))

    def describe(self, item: int) -> str:
        """The file, and the lines of the documents or the tokens in it."""
        shard, first, end = self._reader.place(item)
        if shard.documents is None:
            return f"{self._file_name}, tokens {shard.start + first} to {shard.start + end - 1}"

        # Read when a message wants it: nothing else needs to know where documents begin.
        documents = read_documents(shard.documents)
        within = np.searchsorted(documents[:, 0], [first, end - 1], side="right") - 1
        lines = documents[within, 1].tolist()
        begun, ended = lines
        if begun == ended:
            return f"{self._file_name}, line {begun}"
        return f"{self._file_name}, lines {begun} to {ended}"
