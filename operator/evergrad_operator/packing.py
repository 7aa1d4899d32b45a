"""Short texts for what the status has little room for: counts by node, ranges of numbers, rates. Pure."""

from collections.abc import Iterable

from evergrad_operator.raw import get_float


def pack_counts(counts: Iterable[int]) -> str:
    """One whole number a node, repeated ones together: ``0x4,1,-1x2``. Some bytes a node at most."""
    groups: list[list[int]] = []
    for count in counts:
        if groups and groups[-1][0] == count:
            groups[-1][1] += 1
        else:
            groups.append([count, 1])
    return ",".join(str(count) if times == 1 else f"{count}x{times}" for count, times in groups)


def unpack_counts(text: str) -> tuple[int, ...]:
    """The inverse of ``pack_counts``; nothing for what it never wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        count, _, times = part.partition("x")
        if (
            not count.removeprefix("-").isdecimal()
            or not (times.isdecimal() or not times)
            # A status may be written by anybody who may patch it: a count must not become a list of
            # millions.
            or len(times) > 4
        ):
            return ()
        found += [int(count)] * int(times or 1)
    return tuple(found)


def pack_ranges(numbers: Iterable[int]) -> str:
    """Whole numbers from 0, neighbours together: ``0-3,7``."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ",".join(
        str(first) if first == last else f"{first}-{last}" for first, last in ranges
    )


def unpack_ranges(text: str) -> tuple[int, ...]:
    """The inverse of ``pack_ranges``; nothing for what it never wrote."""
    found: list[int] = []
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        # Bounded, as counts are.
        if not first.isdecimal() or not (last or first).isdecimal() or len(last or first) > 5:
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def format_rate(rate: float) -> str:
    """Three digits or so and a unit: ``41.2k``. ``parse_rate`` and this again give the same text."""
    # A number that rounding would carry into the next size is written in that one.
    for least, size, unit in ((999.95e6, 1e9, "G"), (999.95e3, 1e6, "M"), (999.5, 1e3, "k")):
        if rate >= least:
            return f"{rate / size:.1f}{unit}"
    return f"{rate:.0f}" if rate >= 9.95 else f"{rate:.1f}"


def parse_rate(text: str) -> float | None:
    """The inverse of ``format_rate``, as far as its digits go; None for what it never wrote."""
    size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 1.0)
    number = get_float({"": text if size == 1.0 else text[:-1]}, "")
    return None if number is None else number * size
