"""Hides sequences of bases in what is logged: they are data, perhaps of a person."""

import re
from typing import Final

HIDDEN_LENGTH: Final = 20
"""Bases of the shortest text that is hidden; alleles have 16 at most, and are shown."""
_BASES: Final = re.compile(rf"[ACGTN]{{{HIDDEN_LENGTH},}}", re.IGNORECASE)


def hide_bases(text: str) -> str:
    """Return ``text`` with the length of each sequence in its place. A single letter that is repeated says
    nothing, and stays."""
    return _BASES.sub(
        lambda found: f"[{len(found[0])} bases]" if len(set(found[0])) > 1 else found[0],
        text,
    )
