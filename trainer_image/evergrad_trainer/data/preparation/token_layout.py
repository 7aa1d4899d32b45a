"""Detects from the first bytes of a token file whether its ids have another width or byte order."""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

HEAD_BYTES: Final = 2**14
"""Bytes of a file that are checked. They contain several thousand ids."""
_FEWEST_GROUPS: Final = 16
"""Minimum number of groups, one per id of the wider type. With fewer groups, zeros could occur by chance."""
_NUMPY: Final = b"\x93NUMPY"
_DTYPE: Final = {2: "uint16", 4: "uint32", 8: "int64"}


@dataclass(frozen=True)
class TokenLayout:
    """The layout of ids in a file.

    ``width``: bytes per id. ``order``: byte order, ``<`` or ``>``. ``skip``: bytes of the header.
    """

    width: int
    order: str
    skip: int = 0

    @property
    def numpy_type(self) -> str:
        """The type in numpy's notation, for example ``<u4``."""
        return f"{self.order}{'i8' if self.width == 8 else f'u{self.width}'}"

    @property
    def in_words(self) -> str:
        """The type in words, for example ``big-endian uint32``."""
        order = "big" if self.order == ">" else "little"
        return f"{order}-endian {_DTYPE[self.width]}"


def find_layout(head: bytes, dtype: str) -> TokenLayout | None:
    """Return the layout of the ids in ``head`` if it is certainly not little-endian ``dtype``, else None.

    ``head``: the first bytes of the file. ``dtype``: the type in the manifest, uint16 or uint32. Ids are
    small compared with their type, so their high bytes are zero. If the type is too narrow, these zeros
    appear as ids, always at the same positions of a group. If the byte order is wrong, they appear as low
    bytes.
    """
    width = np.dtype(dtype).itemsize
    for wider in (8, 4):
        if wider <= width or len(head) < wider * _FEWEST_GROUPS:
            continue
        # Each row is one id of the wider type. Its high half is zero, and its low half is not.
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
    """Whether the ids have the other byte order.

    In that case, the low half is zero in at least 99% of the ids, and the high half has at least 8 values. A
    file that repeats a single id, for example the padding token 256, has only one value.
    """
    if len(head) < width * _FEWEST_GROUPS:
        return False
    halves = np.frombuffer(head, dtype=f"u{width // 2}", count=len(head) // width * 2)
    low, high = halves[0::2], halves[1::2]
    return bool(np.mean(low != 0) <= 0.01 and len(np.unique(high)) >= 8)


def _is_wide(head: bytes, *, order: str = "<") -> bool:
    """Whether the 16-bit ids are halves of 32-bit ids, as large vocabularies need.

    In that case, every high half is below 16 (a vocabulary of a million), and more than 20% of the high
    halves are zero, while the low halves vary. Ids that alternate with a separator do not have this pattern.
    """
    halves = np.frombuffer(head, dtype=f"{order}u2", count=len(head) // 4 * 2)
    low, high = (halves[0::2], halves[1::2])
    if order == ">":
        low, high = high, low
    is_small = high.max() < 16 and np.mean(high == 0) > 0.2
    return bool(is_small and high.any() and low.max() >= 2**12 and np.median(low) >= 2**8)


def describe_header(head: bytes) -> str | None:
    """Return the format of a file with a header, which would be read as ids, or None."""
    return "a numpy file (.npy)" if head.startswith(_NUMPY) else None


def conversion(path: Path, layout: TokenLayout) -> str:
    """Return a Python expression that writes the ids as little-endian uint32 to a file next to ``path``."""
    target = f"{path.name}.uint32"
    return f"numpy.fromfile({path.name!r}, {layout.numpy_type!r}).astype('<u4').tofile({target!r})"
