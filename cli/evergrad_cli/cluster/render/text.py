"""Formats runs for a terminal: tables, ages, bars. Pure."""

import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

NOTHING: Final = "–"
_GAP: Final = "   "
_SCALES: Final = {"k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
"""Factor for each letter at the end of a short count."""


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return lines whose columns are as wide as their widest cell, as kubectl prints them. The last column is
    not padded."""
    cells = [[printable(cell) for cell in row] for row in (headers, *rows)]
    widths = [max(_width(row[column]) for row in cells) for column in range(len(headers))]
    return [
        _GAP.join(
            cell + " " * (width - _width(cell))
            for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in cells
    ]


def _width(text: str) -> int:
    # A terminal shows East Asian characters two columns wide.
    return sum(
        2 if unicodedata.east_asian_width(character) in "WF" else 1 for character in text
    )


def printable(text: str) -> str:
    """Return ``text`` on one line, with control characters and line breaks as spaces."""
    # Messages come from pods and other users: an escape sequence in a message could control the terminal.
    return "".join(
        " " if unicodedata.category(character) in ("Cc", "Cf", "Zl", "Zp") else character
        for character in text
    )


def printable_lines(text: str) -> list[str]:
    """Return the lines of ``text``, each as ``printable`` returns it."""
    return [printable(line).rstrip() for line in text.splitlines()]


def age(seconds: float | None) -> str:
    """Format a duration as kubectl does: ``75`` → ``75s``, ``600`` → ``10m``, ``9000`` → ``2h30m``,
    ``200000`` → ``2d7h``."""
    if seconds is None:
        return NOTHING
    total = max(0, int(seconds))
    if total < 120:
        return f"{total}s"

    # Show at most two units, and the smaller one only while it matters, as `kubectl get` does.
    minutes, hours, days = total // 60, total // 3600, total // 86400
    if minutes < 10:
        return f"{minutes}m{total % 60}s" if total % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    return f"{days}d"


def bar(share: float, *, width: int = 30, is_unicode: bool = True) -> str:
    """Return a progress bar of ``width`` characters. The bar is full only if ``share`` is 1."""
    share = min(1.0, max(0.0, share))
    full, empty = ("█", "░") if is_unicode else ("#", ".")
    # Round down: a full bar means that the run is done.
    done = int(share * width)
    return full * done + empty * (width - done)


def parse_time(value: Any) -> float | None:
    """Parse a time of the API (RFC 3339) → Unix seconds; None if it is not a valid time."""
    if not isinstance(value, str):
        return None
    # datetime accepts six digits of a fraction, and the API writes up to nine.
    head, point, fraction = value.removesuffix("Z").partition(".")
    try:
        whole = datetime.fromisoformat(head if value.endswith("Z") else value)
    except ValueError:
        return None
    if not value.endswith("Z"):
        return whole.timestamp()
    rest = float(f"0.{fraction}") if point and fraction.isdigit() else 0.0
    return whole.replace(tzinfo=UTC).timestamp() + rest


def parse_short_count(value: Any) -> float | None:
    """Parse a short count: ``41.2k`` → 41200.0, ``512`` → 512.0; None if it is not a valid number."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int | float):
        return float(value)
    # The status shortens numbers only by powers of ten.
    text = str(value).strip()
    scale = _SCALES.get(text[-1:], 1.0)
    try:
        return float(text.rstrip("kMBGT")) * scale
    except ValueError:
        return None
