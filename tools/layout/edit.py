"""Replacements in files of the tree whose root is the first argument."""

import sys
from pathlib import Path

ROOT = Path(sys.argv[1])


def sub(p, *pairs):
    """Replace texts in one file; names those that it lacks."""
    f = ROOT / p
    s = f.read_text("utf-8")
    for a, b in pairs:
        if a not in s:
            print("MISSING", p, repr(a[:70]))
        s = s.replace(a, b)
    f.write_text(s, "utf-8")
