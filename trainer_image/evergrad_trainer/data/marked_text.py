"""Texts with parts that are learned, and their tokens with a mark for each token."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

MARKS: Final = 2
"""Number of the rule in ``marks_of``. It must change if the rule changes, because rows get other marks."""


@dataclass(frozen=True)
class MarkedSpan:
    """Characters [start, end) of a text."""

    start: int
    end: int


class MarkedText(str):
    """A text with its spans that are learned, in order.

    ``is_open``: the end of the document follows the text and is learned. ``dropped``: the kinds of message
    parts that a chat template omitted.
    """

    __slots__ = ("dropped", "is_open", "spans")
    spans: tuple[MarkedSpan, ...]
    is_open: bool
    dropped: frozenset[str]

    def __new__(
        cls, text: str, spans: Sequence[MarkedSpan] = (), *, is_open: bool = False
    ) -> "MarkedText":
        """Create a text with its spans."""
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        made.is_open = is_open
        made.dropped = frozenset()
        return made


def marks_of(text: MarkedText, offsets: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return which tokens are learned, bool [tokens]: the tokens with at least one character in a span.

    ``offsets``: the characters [start, end) of each token. A token that starts before a span and ends in it
    is learned, as in transformers, because the model cannot learn a part of a token. A token without
    characters is treated like the character at its position. For example, with a span [2, 5), a token [1, 3)
    is learned.
    """
    spans = [span for span in text.spans if span.start < span.end]
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    if not spans:
        return np.zeros(len(places), dtype=np.bool_)
    begins = np.array([span.start for span in spans], dtype=np.int64)
    ends = np.array([span.end for span in spans], dtype=np.int64)
    starts, lasts = places[:, 0], np.maximum(places[:, 0], places[:, 1] - 1)
    # Spans do not overlap, so it is enough to check the last span that starts at or before a token's end.
    at = np.searchsorted(begins, lasts, side="right") - 1
    marks: npt.NDArray[np.bool_] = (at >= 0) & (starts < ends[at])
    return marks


def join_marks(ids: npt.NDArray[Any], marks: npt.NDArray[np.bool_]) -> npt.NDArray[Any]:
    """Join ids and marks in one array, as in files: twice the id, plus 1 if the id is learned."""
    joined: npt.NDArray[Any] = ids * 2 + marks.astype(ids.dtype)
    return joined


def split_marks(
    values: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Split an array into ids and marks. The inverse of :func:`join_marks`."""
    return values >> 1, (values & 1).astype(np.bool_)
