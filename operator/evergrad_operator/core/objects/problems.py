"""Formats the problems of a run as one text of bounded size, for its status. Pure."""

from collections.abc import Sequence
from typing import Final

from evergrad_manifest.errors import Problem

LONGEST_LIST: Final = 4000
"""Longest list of problems in a status, in bytes; the CRD limits the message to 4,096 characters."""
_ROOM_FOR_COUNT: Final = 96


def list_problems(problems: Sequence[Problem], *, most: int = LONGEST_LIST) -> str:
    """Return as many whole problems as fit into ``most`` bytes, followed by the number of problems left
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
    # Cut a single problem that is too long, because a status without any problem explains nothing.
    shown = texts[:kept] or [
        texts[0].encode()[: most - _ROOM_FOR_COUNT].decode(errors="ignore") + "…"
    ]
    left = len(texts) - len(shown)
    rest = [f"{left} more: `evergrad validate` of the file lists them."] if left else []
    return " ".join([*shown, *rest])
