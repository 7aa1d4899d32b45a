"""Problems of a run as one text of bounded size, for its status. Pure."""

from collections.abc import Sequence
from typing import Final

from evergrad_manifest.errors import Problem

LONGEST_LIST: Final = 4000
"""Longest list of problems in a status, in bytes: the CRD allows its message 4,096 characters."""
_ROOM_FOR_COUNT: Final = 96


def list_problems(problems: Sequence[Problem], *, most: int = LONGEST_LIST) -> str:
    """Write the problems after each other, as many whole ones as ``most`` bytes hold, then how many were left
    out."""
    texts = [str(problem) for problem in problems]
    kept, size = 0, 0
    for text in texts:
        size += len(text.encode()) + 1
        if size > most - _ROOM_FOR_COUNT:
            break
        kept += 1
    if kept == len(texts):
        return " ".join(texts)
    # A single problem that is too long is cut, because a status without any explains nothing.
    shown = texts[:kept] or [
        texts[0].encode()[: most - _ROOM_FOR_COUNT].decode(errors="ignore") + "…"
    ]
    left = len(texts) - len(shown)
    rest = [f"{left} more: `evergrad validate` of the file lists them."] if left else []
    return " ".join([*shown, *rest])
