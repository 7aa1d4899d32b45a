"""Formats numbers for people: durations, large counts, bytes, times. Pure."""

import math
from datetime import UTC, datetime

_NOT_A_NUMBER = "–"


def duration(seconds: float) -> str:
    """Format a duration with at most two units.

    For example, ``0.045`` → ``45ms``, ``75`` → ``1m15s``, ``18720`` → ``5h12m``, ``200000`` → ``2d07h``.
    """
    if not math.isfinite(seconds):
        return _NOT_A_NUMBER
    if seconds < 0:
        return f"-{duration(-seconds)}"
    if seconds == 0:
        return "0s"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g}ms" if seconds >= 0.001 else f"{seconds * 1e6:.3g}µs"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days:,}d{hours:02d}h"


def count(number: float) -> str:
    """Format a count: ``1234567`` → ``1,234,567``. A fraction is rounded."""
    return f"{round(number):,}" if math.isfinite(number) else _NOT_A_NUMBER


def plural(number: int, noun: str) -> str:
    """Format a number with its noun: ``1 node``, ``3 nodes``, ``0 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{count(number)} {noun}{'es' if noun.endswith('s') else 's'}"


def short_count(number: float) -> str:
    """Format a count with three digits and a decimal unit: ``41234`` → ``41.2k``, ``10200000`` →
    ``10.2M``."""
    return _scaled(number, 1000.0, ("", "k", "M", "B", "T"))


def size(number_of_bytes: float) -> str:
    """Format a number of bytes in powers of 1024: ``1536`` → ``1.5 KiB``."""
    return _scaled(number_of_bytes, 1024.0, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(number: float, base: float, units: tuple[str, ...]) -> str:
    if not math.isfinite(number):
        return _NOT_A_NUMBER
    rest, unit = abs(number), 0
    # 999.5 and more would round to four digits.
    while rest >= (999.5 if base == 1000 else 1000) and unit < len(units) - 1:
        rest, unit = rest / base, unit + 1
    if rest >= 10_000:
        return f"{number:.3g}"
    # Show three digits in all, and no fraction of a whole number without a unit.
    digits = (
        0
        if unit == 0 and rest == round(rest)
        else 2
        if rest < 9.995
        else 1
        if rest < 99.95
        else 0
    )
    text = f"{rest:.{digits}f}"
    if "." in text and unit:
        text = text.rstrip("0").rstrip(".")
    return f"{'-' if number < 0 else ''}{text}{units[unit]}"


def real(number: float, digits: int = 4) -> str:
    """Format a number: ``2.41318`` → ``2.4132``. Very large and very small numbers use scientific notation;
    ``–`` if the value is not finite."""
    if not math.isfinite(number):
        return _NOT_A_NUMBER
    # In plain notation, a small number would be 0.0000, and a large one would have too many digits to count.
    if number != 0 and not 10.0**-digits <= abs(number) < 1e6:
        return f"{number:.{max(digits - 1, 1)}e}"
    return f"{number:,.{digits}f}"


def compact(number: float) -> str:
    """Format a number with at most four significant digits, as short as possible: ``0.001`` → ``0.001``,
    ``2.5e-05`` → ``2.5e-05``."""
    return f"{number:.4g}" if math.isfinite(number) else _NOT_A_NUMBER


def percent(ratio: float) -> str:
    """Format a share: ``0.9834`` → ``98.3%``. Only exactly 1 and exactly 0 become 100% and 0%."""
    if not math.isfinite(ratio):
        return _NOT_A_NUMBER
    if ratio in (0.0, 1.0):
        return f"{ratio * 100:.0f}%"
    if 0 < ratio < 0.0005:
        return "<0.1%"
    if 0.9995 <= ratio < 1:
        return ">99.9%"
    return f"{ratio * 100:.1f}%"


def utc(unix_seconds: float) -> str:
    """Format Unix time as ``2026-03-01 12:33:10`` in UTC; ``–`` if the time is outside the calendar."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return _NOT_A_NUMBER
