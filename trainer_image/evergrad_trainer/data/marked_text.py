"""Texts of which some parts are learned, and their tokens with a mark each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MARKS: Final = 2
"""Number of the rule of ``marks_of``. Another rule gives rows other marks, and needs another number."""


@dataclass(frozen=True)
class MarkedSpan:
    """Characters [start, end) of a text."""

    start: int
    end: int


class MarkedText(str):
    """A text with the spans of it that are learned, in their order.

    ``is_open``: the end of the document follows, and is learned. ``dropped``: the kinds of parts of its
    messages that a chat template left out.
    """

    __slots__ = ("dropped", "is_open", "spans")
    spans: tuple[MarkedSpan, ...]
    is_open: bool
    dropped: frozenset[str]

    def __new__(
        cls, text: str, spans: Sequence[MarkedSpan] = (), *, is_open: bool = False
    ) -> "MarkedText":
        """``text`` with its spans."""
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        made.is_open = is_open
        made.dropped = frozenset()
        return made


def marks_of(text: MarkedText, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which of the tokens of these characters are learned: those that have a character in a span.

    A token that begins before a span and reaches into it is one of them, as in transformers: the model cannot
    learn the rest of it by itself. A token of no character counts as the one that it stands before.
    """
    spans = [span for span in text.spans if span.start < span.end]
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    if not spans:
        return np.zeros(len(places), dtype=np.bool_)
    begins = np.array([span.start for span in spans], dtype=np.int64)
    ends = np.array([span.end for span in spans], dtype=np.int64)
    starts, lasts = places[:, 0], np.maximum(places[:, 0], places[:, 1] - 1)
    # Spans do not overlap: where a token is in any, it is in the last of those that begin up to its end.
    at = np.searchsorted(begins, lasts, side="right") - 1
    marks: npt.NDArray[np.bool_] = (at >= 0) & (starts < ends[at])
    return marks


def join_marks(ids: npt.NDArray[Any], marks: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Ids and marks as one array, as a file keeps them: twice the id, and one more where it is learned."""
    joined: npt.NDArray[Any] = ids * 2 + marks.astype(ids.dtype)
    return joined


def split_marks(
    values: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """The inverse of :func:`join_marks`."""
    return values >> 1, (values & 1).astype(np.bool_)
