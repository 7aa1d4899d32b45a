"""Texts of which some parts are learned, and their tokens with a mark each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Span:
    """Characters [start, end) of a text."""

    start: int
    end: int


class MarkedText(str):
    """A text with the spans of it that are learned, in their order.

    ``is_open``: the end of the document follows, and is learned.
    """

    __slots__ = ("is_open", "spans")
    spans: tuple[Span, ...]
    is_open: bool

    def __new__(
        cls, text: str, spans: Sequence[Span] = (), *, is_open: bool = False
    ) -> "MarkedText":
        """``text`` with its spans."""
        made = super().__new__(cls, text)
        made.spans = tuple(spans)
        made.is_open = is_open
        return made


def marks_of(text: MarkedText, starts: Sequence[int]) -> npt.NDArray[np.bool_]:
    """Which of the tokens that begin at these characters are learned: those that begin in a span."""
    begins = np.array([span.start for span in text.spans], dtype=np.int64)
    ends = np.array([span.end for span in text.spans], dtype=np.int64)
    places = np.asarray(starts, dtype=np.int64)
    if not len(begins):
        return np.zeros(len(places), dtype=np.bool_)
    at = np.searchsorted(begins, places, side="right") - 1
    marks: npt.NDArray[np.bool_] = (at >= 0) & (places < ends[at])
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
