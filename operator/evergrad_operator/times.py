"""Kubernetes' times, RFC 3339 in UTC, ↔ seconds since 1970. Pure: the clock is always an argument."""

from datetime import UTC, datetime
from typing import Any


def parse_time(value: Any) -> float | None:
    """Seconds since 1970; None for what is no time."""
    if not isinstance(value, str):
        return None
    try:
        parsed = datetime.fromisoformat(value)
    except ValueError:
        return None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def format_time(seconds: float) -> str:
    """Whole seconds, as Kubernetes writes them."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def format_duration(seconds: float) -> str:
    """Two units at most, as kubectl prints an age: ``12s``, ``3m20s``, ``5h12m``, ``2d4h``."""
    whole = max(0, int(seconds))
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    for place, (unit, size) in enumerate(units):
        if whole >= size:
            following = units[place + 1 : place + 2]
            rest = "".join(
                f"{whole % size // small}{name}"
                for name, small in following
                if whole % size >= small
            )
            return f"{whole // size}{unit}{rest}"
    return "0s"
