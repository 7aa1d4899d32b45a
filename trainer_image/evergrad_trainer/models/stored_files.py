"""Checks that a transformers directory contains one set of weights, so that all readers load the same."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import Problem

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
_LARGEST_HEADER: Final = 100 * 2**20
"""Maximum bytes of the header of a file, the same as in the safetensors library."""
_BLOCK: Final = 2**22


def find_ambiguity(directory: Path, *, field: str) -> Problem | None:
    """Return the problem if a directory contains two models, which two saves can leave; else None.

    Two models are a single file next to an index, or a tensor with different values in two files of the
    index. transformers reads the single file, and the last file that contains a tensor; other readers follow
    the index. Files that cannot be read are reported later, when they are loaded.
    """
    index = directory / INDEX
    try:
        value: Any = json.loads(index.read_text(encoding="utf-8"))
        files = sorted(set(map(str, value["weight_map"].values())))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    remedy = "Keep the files of one save in the directory, and remove those of the other"
    if SINGLE not in files and (directory / SINGLE).exists():
        what = f"{directory} contains both {SINGLE} and {INDEX}"
        why = "each names weights, and it is unclear which of them are meant"
        return Problem(field, what, why, remedy)

    # Compare only tensors that occur in several files: in a valid directory, only headers are read.
    holders: dict[str, list[str]] = {}
    tables = {name: _read_table(directory / name) for name in files}
    for name, table in tables.items():
        for tensor in table:
            holders.setdefault(tensor, []).append(name)
    for tensor, names in holders.items():
        for one, other in pairwise(names):
            first, second = (
                (directory / name, *tables[name][tensor]) for name in (one, other)
            )
            if not _are_equal(first, second):
                what = f"the tensor {tensor!r} has different values in {one} and {other}"
                why = f"both are files of {directory / INDEX}"
                return Problem(field, what, why, remedy)
    return None


def _read_table(path: Path) -> dict[str, tuple[int, int]]:
    """Return the range of bytes of each tensor in a file; empty if the file is not valid."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _LARGEST_HEADER:
                return {}
            header = json.loads(file.read(length))
        begin = 8 + length
        return {
            name: (begin + one["data_offsets"][0], begin + one["data_offsets"][1])
            for name, one in header.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return {}


def _are_equal(one: tuple[Path, int, int], other: tuple[Path, int, int]) -> bool:
    """Whether two ranges [begin, end) of files contain the same bytes."""
    (first, begin, end), (second, start, stop) = one, other
    if end - begin != stop - start:
        return False
    with first.open("rb") as left, second.open("rb") as right:
        left.seek(begin)
        right.seek(start)
        remaining = end - begin
        while remaining:
            size = min(_BLOCK, remaining)
            blocks = left.read(size), right.read(size)
            if blocks[0] != blocks[1]:
                return False
            if not blocks[0]:
                # Both files are truncated, which is reported when they are loaded.
                return True
            remaining -= len(blocks[0])
    return True
