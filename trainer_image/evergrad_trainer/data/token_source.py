"""Items that are windows of a token sequence. Every token is predicted from the tokens before it."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from evergrad_trainer.data.batch import Rows
from evergrad_trainer.data.prepared import PreparedSource, TokenSequence
from evergrad_trainer.data.token_files import TokenReader, read_documents

IGNORE_INDEX: Final = -100
"""The label of positions at which nothing is learned."""
INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
POSITIONS: Final = "position_ids"
"""Position of each token in its document. It starts at 0 in each document, and a token attends only to its
own document."""


def positions_behind(is_end: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Return positions, int64 [n, S], that start at 0 at the left edge and after each end of a document.

    ``is_end``: bool [n, S], true at each end of a document. For example, the ends [0, 1, 0] give the
    positions [0, 1, 0].
    """
    places = np.broadcast_to(np.arange(is_end.shape[1]), is_end.shape)
    begins = np.zeros(is_end.shape, dtype=np.int64)
    begins[:, 1:] = np.where(is_end[:, :-1], places[:, 1:], 0)
    positions: npt.NDArray[np.int64] = places - np.maximum.accumulate(begins, axis=1)
    return positions


def place_of_line(source: PreparedSource, line: int) -> tuple[str, int]:
    """Return the file and the line in this file for a line number that counts through the whole source."""
    files = source.files
    if not files:
        return source.path.name, line
    ends = list(accumulate(file.lines for file in files))
    at = bisect_right(ends, line - 1)
    return files[at].name, line - (ends[at - 1] if at else 0)


class TokenSource:
    """Items with ``input_ids`` and ``labels``, int64 [items, S].

    Labels are shifted by one, and IGNORE_INDEX at positions at which nothing is learned. The weight of an
    item is its number of labels. ``sequence``: the part of ``source`` to read, either its training tokens or
    its held-out tokens. ``keeps_apart``: also return ``position_ids``, which start at 0 after each end of a
    document. In this case the end of a document has no label, because another document follows.
    """

    fill: Mapping[str, int] = {INPUT_IDS: 0, LABELS: IGNORE_INDEX, POSITIONS: 0}

    def __init__(
        self,
        source: PreparedSource,
        sequence: TokenSequence,
        *,
        sequence_length: int,
        end_of_document: int,
        keeps_apart: bool = False,
    ) -> None:
        self.fingerprint = source.fingerprint
        self._source = source
        self._end = end_of_document if keeps_apart else None
        self._reader = TokenReader(
            sequence, sequence_length=sequence_length, end_of_document=end_of_document
        )

    def __len__(self) -> int:
        return self._reader.num_windows

    def read(self, items: Sequence[int]) -> Rows:
        """Read items. Raises IndexError if an item does not exist, and DataError if a file cannot be read."""
        windows = self._reader.read(items)
        length = windows.tokens.shape[1] - 1
        # Always copy: the slice of a single row is already contiguous, and changing its labels would change
        # the inputs.
        labels = windows.tokens[:, 1:].copy()
        valid = np.minimum(windows.lengths - 1, length)
        if int(valid.min()) < length:
            labels[np.arange(length) >= valid[:, None]] = IGNORE_INDEX
        inputs = np.ascontiguousarray(windows.tokens[:, :-1])
        tensors = {INPUT_IDS: torch.from_numpy(inputs), LABELS: torch.from_numpy(labels)}
        if self._end is not None:
            is_end = inputs == self._end
            labels[is_end] = IGNORE_INDEX
            tensors[POSITIONS] = torch.from_numpy(positions_behind(is_end))
            valid = (labels != IGNORE_INDEX).sum(axis=1)
        return Rows(tensors, weight=int(valid.sum()))

    def describe(self, item: int) -> str:
        """Return the file and the lines or rows of the item's documents, or the range of its tokens."""
        shard, first, end = self._reader.place(item)
        if shard.documents is None:
            # Token files are read in place, so the shard is the file.
            return f"{shard.path.name}, tokens {shard.start + first} to {shard.start + end - 1}"

        # Read the index only for messages: no other code needs the starts of documents.
        documents = read_documents(shard.documents)
        within = np.searchsorted(documents[:, 0], [first, end - 1], side="right") - 1
        begun, ended = documents[within, 1].tolist()
        unit = self._source.unit
        file, line = place_of_line(self._source, begun)
        last_file, last_line = place_of_line(self._source, ended)
        if unit == "file":
            return file if file == last_file else f"{file} to {last_file}"
        if (file, line) == (last_file, last_line):
            return f"{file}, {unit} {line}"
        if file == last_file:
            return f"{file}, {unit}s {line} to {last_line}"
        return f"{file}, {unit} {line}, to {last_file}, {unit} {last_line}"
