"""Finds the word that was probably meant."""

import difflib
from collections.abc import Iterable
from typing import Final

_LONGEST_KEY_COMPARED: Final = 64
"""A longer word is no slip of a key, and comparing it would take time."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate that is most like ``word``, if one is like it at all; upper and lower case count as
    equal."""
    if len(word) > _LONGEST_KEY_COMPARED:
        return None
    by_folded = {fold(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(fold(word), by_folded, n=1, cutoff=0.7)
    return by_folded[found[0]] if found else None


def fold(word: str) -> str:
    """``word`` without what people write differently: case, dashes, underscores."""
    return word.replace("_", "").replace("-", "").casefold()
