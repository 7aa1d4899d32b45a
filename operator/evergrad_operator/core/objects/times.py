"""Converts Kubernetes times (RFC 3339 in UTC) to and from seconds since 1970. Pure: the clock is an
argument."""

from datetime import UTC, datetime
from typing import Any, Final

LATEST: Final = 253402300799
"""The last second of the year 9999, which is the latest valid time."""
_EARLIEST: Final = -62135596800


def parse_time(value: Any) -> float | None:
    """Return seconds since 1970; None if the value is not a valid time in the years 1 to 9999 in UTC."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except (ValueError, OverflowError):
        return None
    # Read a time without a zone as UTC. Otherwise the result would depend on the operator's local time zone.
    if parsed.tzinfo is None:
        parsed = parsed.replace(tzinfo=UTC)
    # With a zone, the time may be outside these years in UTC. Such a time could not be formatted again.
    seconds = parsed.timestamp()
    return seconds if _EARLIEST <= seconds < LATEST + 1 else None


def format_time(seconds: float) -> str:
    """Return the time in whole seconds, as Kubernetes writes it."""
    moment = datetime.fromtimestamp(int(seconds), UTC)
    # Use isoformat, because strftime may write a year with fewer than four digits.
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
