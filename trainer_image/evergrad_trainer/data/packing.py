"""Packs rows into samples. The rows of a sample depend only on the lengths of all rows."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Bins:
    """Samples as lists of rows: sample i has the rows ``rows[starts[i]:starts[i + 1]]``."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, sample: int) -> list[int]:
        """Return the rows of a sample. Raises IndexError if the sample does not exist."""
        if not 0 <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)}")
        found: list[int] = self.rows[self.starts[sample] : self.starts[sample + 1]].tolist()
        return found


def pack(sizes: npt.NDArray[np.int64], *, capacity: int) -> Bins:
    """Pack rows of these sizes, int64 [rows], into samples of at most ``capacity`` (best fit, decreasing).

    The longest row comes first. Each row is put into the sample in which it leaves the least room. Rows of
    the same size keep their order, so the same sizes give the same samples on every machine. For example, the
    sizes [2, 3, 1] with a capacity of 4 give the samples [1, 2] and [0]. Raises ValueError if a row is larger
    than ``capacity``.
    """
    if len(sizes) and int(sizes.max()) > capacity:
        raise ValueError(f"a row of {int(sizes.max())} does not fit into {capacity}")
    order = np.argsort(-sizes, kind="stable").tolist()
    known: list[int] = sizes.tolist()
    # For each amount of room, keep the samples with this room, and a bit that is set if there are any. The
    # search for the least sufficient room then takes two operations on one large integer.
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]
    has_room = 0
    members: list[list[int]] = []
    for row in order:
        size = known[row]
        enough = has_room >> size
        if enough:
            room = size + (enough & -enough).bit_length() - 1
            sample = waiting[room].pop()
            if not waiting[room]:
                has_room &= ~(1 << room)
        else:
            room, sample = capacity, len(members)
            members.append([])
        members[sample].append(row)
        left = room - size
        if left:
            waiting[left].append(sample)
            has_room |= 1 << left
    counts = np.array([len(one) for one in members], dtype=np.int64)
    rows = np.array([row for one in members for row in one], dtype=np.int64)
    return Bins(rows, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64))


def one_each(number: int) -> Bins:
    """Put each row into a separate sample."""
    return Bins(np.arange(number), np.arange(number + 1))
