"""Items of marked token rows: one or several rows per sample, each attending only to itself."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.batch import Rows
from evergrad_trainer.data.marked_text import split_marks
from evergrad_trainer.data.packing import one_each, pack
from evergrad_trainer.data.prepared import PreparedSource, TokenSequence
from evergrad_trainer.data.token_files import TokenReader, read_documents, unreadable
from evergrad_trainer.data.token_source import (
    IGNORE_INDEX,
    INPUT_IDS,
    LABELS,
    POSITIONS,
    place_of_line,
)

_MOST_PLACES = 3


@dataclass(frozen=True)
class TokenRow:
    """The ids of a row, and a mark for each id that is learned. Both have shape (tokens,)."""

    ids: npt.NDArray[np.int64]
    marks: npt.NDArray[np.bool_]


class RowReader:
    """Reads the rows of a sequence of marked tokens by their number."""

    def __init__(self, source: PreparedSource, sequence: TokenSequence) -> None:
        """Read the index of the rows. Raises DataError if it cannot be read or is damaged."""
        self.source = source
        # Only spans are read, so the length of windows has no effect.
        self._reader = TokenReader(sequence, sequence_length=1, end_of_document=0)
        begins, lines = [], []
        shards = sequence.shards
        for start, shard in zip(
            accumulate([0, *(one.tokens for one in shards)]), shards, strict=False
        ):
            # Sources of rows are always prepared, so each shard has an index.
            assert shard.documents is not None  # noqa: S101
            # First token and line [n, 2] of each row.
            index = read_documents(shard.documents)
            # Check the index here: a row ends at the beginning of the next row, so a wrong index would cause
            # no error in training.
            lengths = np.diff(index[:, 0], prepend=0, append=shard.tokens)
            if not len(index) or lengths[0] != 0 or lengths[1:].min() < 1:
                what = f"is not an index of rows of {shard.tokens} tokens"
                raise DataError(unreadable(shard.documents, what))
            begins.append(index[:, 0] + start)
            lines.append(index[:, 1])

        # Compare the number of rows too: a truncated index looks valid, but its last row would contain all
        # following rows.
        number, held_out = sum(map(len, lines)), source.held_out_documents or 0
        wanted = (
            held_out if sequence == source.held_out else (source.documents or 0) - held_out
        )
        if number != wanted:
            (path,) = [one.documents for one in shards[:1] if one.documents is not None]
            every = path.with_name(f"{path.stem.rpartition('-')[0]}-*{path.suffix}")
            what = f"name {number} rows together, and {wanted} are needed"
            raise DataError(unreadable(every, what))
        self._begins = np.concatenate(begins) if begins else np.empty(0, dtype=np.int64)
        self._lines = np.concatenate(lines) if lines else np.empty(0, dtype=np.int64)
        self.lengths: npt.NDArray[np.int64] = np.diff(self._begins, append=sequence.tokens)
        """Number of tokens of each row, of shape (rows,)."""

    def __len__(self) -> int:
        return len(self.lengths)

    def read(self, row: int) -> TokenRow:
        """Read a row. Raises DataError if a file can no longer be read."""
        values = self._reader.read_span(int(self._begins[row]), int(self.lengths[row]))
        return TokenRow(*split_marks(values))

    def describe(self, rows: Sequence[int]) -> str:
        """Return the file and line of each row, for at most 3 rows, and the number of further rows."""
        places = []
        for row in rows[:_MOST_PLACES]:
            file, line = place_of_line(self.source, int(self._lines[row]))
            places.append(f"{file}, {self.source.unit} {line}")
        more = len(rows) - _MOST_PLACES
        return "; ".join(places) + (f" and {more} more" if more > 0 else "")


class RowSource:
    """Items of whole rows, concatenated: ``input_ids``, ``labels`` and ``position_ids``, int64 [items, S].

    A row of n tokens takes n - 1 positions: all tokens except the last, each labelled with the next token if
    the next token is learned. The weight of an item is its number of labels. Without packing, there is no
    tensor ``position_ids``.
    """

    fill: Mapping[str, int] = {INPUT_IDS: 0, LABELS: IGNORE_INDEX, POSITIONS: 0}

    def __init__(
        self,
        reader: RowReader,
        *,
        sequence_length: int,
        is_packed: bool,
        learns_everything: bool = False,
    ) -> None:
        """``is_packed``: several rows share an item. ``learns_everything``: label all tokens of a row."""
        # Include these settings, because they change items and labels, but not the prepared rows.
        said = [reader.source.fingerprint, sequence_length, is_packed, learns_everything]
        self.fingerprint = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
        self.reader = reader
        self._length = sequence_length
        self._is_packed = is_packed
        self._learns_everything = learns_everything
        sizes = reader.lengths - 1
        self._bins = (
            pack(sizes, capacity=sequence_length) if is_packed else one_each(len(sizes))
        )

    def __len__(self) -> int:
        return len(self._bins)

    def read(self, items: Sequence[int]) -> Rows:
        """Read items. Raises IndexError if an item does not exist, and DataError if a file cannot be read."""
        shape = (len(items), self._length)
        inputs = np.zeros(shape, dtype=np.int64)
        labels = np.full(shape, IGNORE_INDEX, dtype=np.int64)
        # Each token after the last row has position 0, so that it attends only to itself.
        positions = np.zeros(shape, dtype=np.int64)
        for at, item in enumerate(items):
            begin = 0
            for number in self._bins.of(item):
                row = self.reader.read(number)
                size = len(row.ids) - 1
                place = slice(begin, begin + size)
                inputs[at, place] = row.ids[:-1]
                is_learned = row.marks[1:] | self._learns_everything
                labels[at, place] = np.where(is_learned, row.ids[1:], IGNORE_INDEX)
                positions[at, place] = np.arange(size)
                begin += size
        tensors = {
            INPUT_IDS: torch.from_numpy(inputs),
            LABELS: torch.from_numpy(labels),
        }
        # A single row needs no positions: causal attention never reaches the padding after its end.
        if self._is_packed:
            tensors[POSITIONS] = torch.from_numpy(positions)
        return Rows(tensors, weight=int((labels != IGNORE_INDEX).sum()))

    def describe(self, item: int) -> str:
        """Return the file and line of the rows of an item."""
        return self.reader.describe(self._bins.of(item))
