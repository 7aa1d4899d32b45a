"""Finds out from the first bytes of a file of token ids whether they have another width or byte order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

HEAD_BYTES: Final = 2**14
"""Bytes of a file that are looked at: some thousand ids."""
_FEWEST_GROUPS: Final = 16
"""Groups of ids, one group for each id of the wider type, below which chance could explain the zeros."""
_NUMPY: Final = b"\x93NUMPY"
_DTYPE: Final = {2: "uint16", 4: "uint32", 8: "int64"}


@dataclass(frozen=True)
class TokenLayout:
    """How ids lie in a file. ``width``: bytes of an id. ``order``: ``<`` or ``>``. ``skip``: bytes of a
    header."""

    width: int
    order: str
    skip: int = 0

    @property
    def numpy_type(self) -> str:
        """The type as numpy spells it."""
        return f"{self.order}{'i8' if self.width == 8 else f'u{self.width}'}"

    @property
    def in_words(self) -> str:
        """The type in words, such as ``big-endian uint32``."""
        order = "big" if self.order == ">" else "little"
        return f"{order}-endian {_DTYPE[self.width]}"


def find_layout(head: bytes, dtype: str) -> TokenLayout | None:
    """The layout of ids that begin with ``head``, where it certainly is not little-endian ``dtype``.

    ``dtype``: what the manifest says, uint16 or uint32. An id is smaller than its type can hold: its high
    bytes are zero. If ids are read with a type that is too narrow, whole ids are these zeros, always at the
    same places of a group; if they are read in the wrong order, low bytes are.
    """
    width = np.dtype(dtype).itemsize
    for wider in (8, 4):
        if wider <= width or len(head) < wider * _FEWEST_GROUPS:
            continue
        # One row for each id of the wider type: its high half is zero, and its low half is not.
        data = np.frombuffer(head, dtype=np.uint8, count=len(head) // wider * wider)
        halves = data.reshape(-1, 2, wider // 2)
        first, second = bool(halves[:, 0].any()), bool(halves[:, 1].any())
        if first and not second:
            return TokenLayout(wider, "<")
        if second and not first:
            return TokenLayout(wider, ">")
        for order in ("<", ">"):
            if wider == 4 and _is_wide(head, order=order):
                return TokenLayout(4, order)
    return TokenLayout(width, ">") if _is_swapped(head, width) else None


def _is_swapped(head: bytes, width: int) -> bool:
    """Whether ids lie in the other byte order: their low half is zero, but for one in a hundred, while their
    high half has many values. The id of a padding token, such as 256, has one."""
    if len(head) < width * _FEWEST_GROUPS:
        return False
    halves = np.frombuffer(head, dtype=f"u{width // 2}", count=len(head) // width * 2)
    low, high = halves[0::2], halves[1::2]
    return bool(np.mean(low != 0) <= 0.01 and len(np.unique(high)) >= 8)


def _is_wide(head: bytes, *, order: str = "<") -> bool:
    """Whether ids of 16 bits are halves of ids that are larger than these hold, as large vocabularies have.

    Every high half is then below 16 (a vocabulary of a million), and a good part of them is zero, while low
    halves are anything. Numbers that alternate with one separator do not look like this.
    """
    halves = np.frombuffer(head, dtype=f"{order}u2", count=len(head) // 4 * 2)
    low, high = (halves[0::2], halves[1::2])
    if order == ">":
        low, high = high, low
    is_small = high.max() < 16 and np.mean(high == 0) > 0.2
    return bool(is_small and high.any() and low.max() >= 2**12 and np.median(low) >= 2**8)


def describe_header(head: bytes) -> str | None:
    """The kind of a file that begins with a header of its own, which would be read as ids."""
    return "a numpy file (.npy)" if head.startswith(_NUMPY) else None


def conversion(path: Path, layout: TokenLayout) -> str:
    """A Python expression that writes the ids as little-endian uint32 next to ``path``."""
    target = f"{path.name}.uint32"
    return f"numpy.fromfile({path.name!r}, {layout.numpy_type!r}).astype('<u4').tofile({target!r})"
