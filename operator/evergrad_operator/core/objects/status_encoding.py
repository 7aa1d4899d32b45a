"""Short texts for what the status has little room for: counts by node, ranges of numbers, rates, mappings.
Pure."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

from evergrad_operator.core.objects.raw import NOTHING, get_float

_SIZES: Final = {"k": 1e3, "M": 1e6, "G": 1e9}
"""Factors by the letter at the end of a rate."""
_MOST_NUMBERS: Final = 4096
"""Numbers that one text may stand for: anybody who may patch a status could ask for millions. A run has 1,024
nodes at most."""
_MOST_DIGITS: Final = 12
_MOST_RATE: Final = 1e15
"""A larger rate would not fit into the status again."""


def pack_counts(counts: Iterable[int]) -> str:
    """Pack one whole number a node, repeated ones together: ``0x4,1,-1x2``. Some bytes a node at most."""
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    parts = [str(count) if times == 1 else f"{count}x{times}" for count, times in groups]
    return ",".join(parts)


def unpack_counts(text: str, *, most: int = 10**_MOST_DIGITS) -> tuple[int, ...]:
    """Unpack the numbers of ``pack_counts``, from -1 to ``most``; none of a text that it did not write."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        count, _, times = part.partition("x")
        # Python refuses to read numbers of thousands of digits.
        digits = count.removeprefix("-")
        is_count = digits.isdecimal() and len(digits) <= _MOST_DIGITS
        is_number_of_times = not times or (times.isdecimal() and len(times) <= 4)
        if not is_count or not is_number_of_times or not -1 <= int(count) <= most:
            return ()
        found += [int(count)] * int(times or 1)
        if len(found) > _MOST_NUMBERS:
            return ()
    return tuple(found)


def pack_ranges(numbers: Iterable[int]) -> str:
    """Pack whole numbers from 0, neighbours together: ``0-3,7``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ",".join(parts)


def unpack_ranges(text: str) -> tuple[int, ...]:
    """Unpack the numbers of ``pack_ranges``; none of a text that it did not write."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        last = last or first
        # Bounded, as counts are.
        is_range = first.isdecimal() and last.isdecimal()
        if not is_range or max(len(first), len(last)) > 5:
            return ()
        found += range(int(first), int(last) + 1)
        if len(found) > _MOST_NUMBERS:
            return ()
    return tuple(found)


def format_rate(rate: float) -> str:
    """Write about three digits and a unit: ``41.2k``. A rate that is parsed again has the same text."""
    # A number that rounding would carry into the next size is written in that one.
    sizes = (
        (999.95e6, 1e9, "G"),
        (999.95e3, 1e6, "M"),
        (999.5, 1e3, "k"),
    )
    for least, size, unit in sizes:
        if rate >= least:
            return f"{rate / size:.1f}{unit}"
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}"


def parse_rate(text: str) -> float | None:
    """Parse the text of ``format_rate``, as far as its digits go; None for a text that it did not write."""
    size = _SIZES.get(text[-1:], 1.0)
    digits = text if size == 1.0 else text[:-1]
    number = get_float({"": digits}, "", least=0, most=_MOST_RATE / size)
    return None if number is None else number * size


def pack_mapping(values: Mapping[str, Any]) -> str:
    """Pack a mapping as one text, empty for an empty mapping."""
    # Sorted: if the same values gave another text, each pass would write the status again.
    return json.dumps(values, sort_keys=True, separators=(",", ":")) if values else ""


def unpack_mapping(text: str) -> Mapping[str, Any]:
    """Unpack the mapping of ``pack_mapping``; empty for a text that it did not write."""
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return NOTHING
    return found if isinstance(found, dict) else NOTHING


def without_empty(value: Any) -> Any:
    """Return ``value`` without None and without empty texts, lists and mappings, at any depth."""
    # A status has little room: a value that equals its default is not written. Most values are texts and
    # numbers, and asking an abstract class takes longer than everything else here.
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        cleaned = {key: without_empty(item) for key, item in value.items()}
        return {
            key: item
            for key, item in cleaned.items()
            if item is not None and item != "" and item != {} and item != []
        }
    if isinstance(value, list | tuple):
        return [without_empty(item) for item in value]
    return value
