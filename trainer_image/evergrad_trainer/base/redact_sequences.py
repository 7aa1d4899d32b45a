"""Removes sequences of DNA bases from log messages, because they are data and may belong to a person."""

import re
from typing import Final

HIDDEN_LENGTH: Final = 20
"""Shortest sequence that is hidden, in bases. Alleles have at most 16 bases and are shown."""
_BASES: Final = re.compile(rf"[ACGTN]{{{HIDDEN_LENGTH},}}", re.IGNORECASE)


def hide_bases(text: str) -> str:
    """Return ``text`` with each sequence replaced by its length, such as ``[24 bases]``.

    A sequence that repeats a single letter contains no information, so it is kept.
    """
    return _BASES.sub(
        lambda found: f"[{len(found[0])} bases]" if len(set(found[0])) > 1 else found[0],
        text,
    )
