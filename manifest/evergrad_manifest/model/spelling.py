"""Finds the word that the user probably meant."""

import difflib
from collections.abc import Iterable
from typing import Final

_LONGEST_KEY_COMPARED: Final = 64
"""A longer word is not a misspelt key, and comparing it would take time."""


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that is most similar to ``word``, ignoring case; None if no candidate is
    similar."""
    if len(word) > _LONGEST_KEY_COMPARED:
        return None
    by_folded = {fold(candidate): candidate for candidate in candidates}
    found = difflib.get_close_matches(fold(word), by_folded, n=1, cutoff=0.7)
    return by_folded[found[0]] if found else None


def fold(word: str) -> str:
    """Return ``word`` without differences of spelling: case, dashes and underscores."""
    return word.replace("_", "").replace("-", "").casefold()
