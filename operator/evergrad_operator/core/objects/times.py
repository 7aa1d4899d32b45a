"""Kubernetes' times, RFC 3339 in UTC, ↔ seconds since 1970. Pure: the clock is always an argument."""

from datetime import UTC, datetime
from typing import Any, Final

LATEST: Final = 253402300799
"""The last second that a time of Kubernetes can name, of the year 9999."""
_EARLIEST: Final = -62135596800


def parse_time(value: Any) -> float | None:
    """Return seconds since 1970; None for a value that is no time of the years 1 to 9999, in UTC."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        return None
    # Read in the local zone, a time without one would depend on where the operator runs.
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=UTC)
    # A zone can lead out of these years: such a time could not be written again.
    seconds = parsed.timestamp()
    return seconds if _EARLIEST <= seconds < LATEST + 1 else None


def format_time(seconds: float) -> str:
    """Return the time in whole seconds, as Kubernetes writes it."""
    moment = datetime.fromtimestamp(int(seconds), UTC)
    # Unlike strftime, with four digits of the year.
    return moment.isoformat().replace("+00:00", "Z")


def format_duration(seconds: float) -> str:
    """Return two units at most, as kubectl prints an age: ``12s``, ``3m20s``, ``5h12m``, ``2d4h``."""
    whole = max(0, int(seconds))
    units = (
        ("d", 86400),
        ("h", 3600),
        ("m", 60),
        ("s", 1),
    )
    for place, (unit, size) in enumerate(units):
        count, rest = divmod(whole, size)
        if not count:
            continue
        text = f"{count}{unit}"
        # Only the next smaller unit follows: a second matters to no age of days.
        for smaller, small in units[place + 1 : place + 2]:
            if rest >= small:
                text += f"{rest // small}{smaller}"
        return text
    return "0s"
