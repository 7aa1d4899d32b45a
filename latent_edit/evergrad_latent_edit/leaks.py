"""Windows of an evaluation set that are also trained on, as a whole or in part."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Final

from evergrad_latent_edit.windows import Window

SAME: Final = "sameSequence"
OVERLAPPING: Final = "overlapping"


def find_leaks(train: Sequence[Window], other: Sequence[Window]) -> dict[str, int]:
    """How many windows of ``other`` have the sequence of one of ``train``, and how many overlap one on a
    chromosome; empty if none does. All windows have one length."""
    sequences = {window.id for window in train}
    starts: dict[str, list[int]] = {}
    for window in train:
        if window.chromosome is not None:
            starts.setdefault(window.chromosome, []).append(window.start)
    for own in starts.values():
        own.sort()

    found = {SAME: 0, OVERLAPPING: 0}
    for window in other:
        found[SAME] += window.id in sequences
        own = starts.get(window.chromosome or "", [])
        # The first one that ends behind this one's beginning; windows are half open.
        first = bisect_right(own, window.start - len(window.sequence))
        found[OVERLAPPING] += first < len(own) and own[first] < window.end
    return {name: count for name, count in found.items() if count}


def describe_leaks(split: str, windows: int, leaks: Mapping[str, int]) -> str:
    """The warning about the leaks of a split with so many windows."""
    words = {SAME: "have the sequence of", OVERLAPPING: "overlap"}
    counts = ", ".join(f"{leaks[name]} {words[name]}" for name in words if name in leaks)
    return f"{split}: of {windows} windows {counts} one that is trained on; what is measured there flatters"
