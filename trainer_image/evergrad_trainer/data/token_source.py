"""Windows of a token sequence as items: every token predicted from those before it."""

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
"""The label of positions where nothing is learned."""
INPUT_IDS: Final = "input_ids"
LABELS: Final = "labels"
POSITIONS: Final = "position_ids"
"""Position of each token in its document: it begins again with each, and so does what a token sees."""


def positions_behind(is_end: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Positions [n, S] that begin again at the left edge and behind each end, from where the ends are."""
    places = np.broadcast_to(np.arange(is_end.shape[1]), is_end.shape)
    begins = np.zeros(is_end.shape, dtype=np.int64)
    begins[:, 1:] = np.where(is_end[:, :-1], places[:, 1:], 0)
    positions: npt.NDArray[np.int64] = places - np.maximum.accumulate(begins, axis=1)
    return positions


def place_of_line(source: PreparedSource, line: int) -> tuple[str, int]:
    """The file, and the line in it, of a line that is counted through the source."""
    files = source.files
    if not files:
        return source.path.name, line
    ends = list(accumulate(file.lines for file in files))
    at = bisect_right(ends, line - 1)
    return files[at].name, line - (ends[at - 1] if at else 0)


class TokenSource:
    """``input_ids`` and ``labels``, int64 [items, S]; labels are shifted by one, and IGNORE_INDEX where
    nothing is learned.

    ``keeps_apart``: also ``position_ids``, which begin again behind each end of a document; an end predicts
    nothing then, since what follows it is another document.

    An item weighs as many tokens as carry a label. ``sequence`` is the part of ``source`` to read: its
    training tokens, or what is held out of them.
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
        if self._end is not None:
            is_end = inputs == self._end
            labels[is_end] = IGNORE_INDEX
            tensors[POSITIONS] = torch.from_numpy(positions_behind(is_end))
            valid = (labels != IGNORE_INDEX).sum(axis=1)
        return Rows(tensors, weight=int(valid.sum()))

    def describe(self, item: int) -> str:
        """The file, and the lines (or rows) of the documents or the tokens in it."""
        shard, first, end = self._reader.place(item)
        if shard.documents is None:
            # Tokens are read where they lie, so that the shard is the file.
            return f"{shard.path.name}, tokens {shard.start + first} to {shard.start + end - 1}"

        # Read when a message wants it: nothing else needs to know where documents begin.
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
