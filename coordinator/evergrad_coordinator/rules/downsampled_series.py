"""A series of bounded size: rows of numbers over a number that grows, merged in pairs when they are too many.

Pure. A row is one reading, or the mean, least and greatest value of several neighbouring ones.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

MOST_ROWS = 600
"""Rows of a series: after a merge 300 are left, and no plot of the page is much wider in pixels."""
MOST_COLUMNS = 40
"""Numbers of a row: what every run has, and the 32 metrics that a recipe may declare."""
_DIGITS = 6
"""Significant digits of a value as it is sent."""


class _Column:
    """One number over all rows: mean, least and greatest value, and how many readings have it."""

    def __init__(self, num_rows: int) -> None:
        nothing = [math.nan] * num_rows
        self.mean = array("d", nothing)
        self.least = array("d", nothing)
        self.most = array("d", nothing)
        self.num = array("l", [0] * num_rows)

    def append_empty(self) -> None:
        for values in (self.mean, self.least, self.most):
            values.append(math.nan)
        self.num.append(0)

    def add(self, value: float) -> None:
        """Add a reading to the newest row."""
        if not self.num[-1]:
            self.mean[-1] = self.least[-1] = self.most[-1] = value
        self.num[-1] += 1
        # A running mean: no sum is kept that would outgrow its digits.
        difference = value - self.mean[-1]
        self.mean[-1] += difference / self.num[-1]
        self.least[-1] = min(self.least[-1], value)
        self.most[-1] = max(self.most[-1], value)

    def cut(self, num_rows: int) -> None:
        for values in (self.mean, self.least, self.most):
            del values[num_rows:]
        del self.num[num_rows:]

    def merge(self) -> None:
        """Make one row of each two."""
        merged = _Column(0)
        for one in range(0, len(self.num), 2):
            merged.append_empty()
            for row in (one, one + 1):
                # A pair without a partner, or with an empty one, is what the other one is.
                if row >= len(self.num) or not self.num[row]:
                    continue
                if not merged.num[-1]:
                    merged.mean[-1] = self.mean[row]
                    merged.least[-1] = self.least[row]
                    merged.most[-1] = self.most[row]
                merged.num[-1] += self.num[row]
                # Weighted by readings: a name that came late has rows with fewer of them.
                share = self.num[row] / merged.num[-1]
                difference = self.mean[row] - merged.mean[-1]
                merged.mean[-1] += difference * share
                merged.least[-1] = min(merged.least[-1], self.least[row])
                merged.most[-1] = max(merged.most[-1], self.most[row])
        self.mean = merged.mean
        self.least = merged.least
        self.most = merged.most
        self.num = merged.num


class Track:
    """Rows of readings over ``x``, which grows; a smaller one takes the place of what stood there."""

    def __init__(self) -> None:
        self.stride = 1
        """Readings of a whole row; doubled by each merge."""
        self.x = array("d")
        """The newest reading's ``x`` of each row."""
        self.columns: dict[str, _Column] = {}
        self._num_in_last = 0
        self._changed_from = 0
        """Rows from this one on have not been sent as they are now."""

    def add(self, x: float, values: Mapping[str, float]) -> None:
        """Add one reading. Names beyond MOST_COLUMNS are left out."""
        # A step that is trained again counts by its last reading, as in metrics.jsonl.
        if self.x and x <= self.x[-1]:
            self.cut(x)

        # A row is full, or there is none: a new one, which may be one too many.
        if not self.x or self._num_in_last >= self.stride:
            if len(self.x) >= MOST_ROWS:
                self.merge()
            self.x.append(x)
            for column in self.columns.values():
                column.append_empty()
            self._num_in_last = 0
        self.x[-1] = x
        self._num_in_last += 1
        # The newest row was perhaps sent with fewer readings, and is sent again.
        self._changed_from = min(self._changed_from, len(self.x) - 1)

        for name, value in values.items():
            if name not in self.columns:
                if len(self.columns) >= MOST_COLUMNS:
                    continue
                # The rows before have none of it, and are sent anew with that.
                self.columns[name] = _Column(len(self.x))
                self._changed_from = 0
            self.columns[name].add(value)

    def rewind(self) -> None:
        """Forget what was sent: the next change is all there is."""
        self._changed_from = 0

    def take_change(self) -> dict[str, Any] | None:
        """Return the rows that have changed since the last call, as JSON values; None where none has.

        ``from`` is the number of rows before them; each column has mean, least and greatest values.
        """
        begin, self._changed_from = self._changed_from, len(self.x)
        if begin >= len(self.x):
            return None
        columns = {}
        for name, one in self.columns.items():
            parts = (one.mean, one.least, one.most)
            columns[name] = [plain_numbers(part[begin:]) for part in parts]
        # With more digits than values: a step of a long run must not be rounded to its neighbour.
        x = plain_numbers(self.x[begin:], digits=12)
        return {
            "from": begin,
            "x": x,
            "columns": columns,
        }

    def cut(self, x: float) -> None:
        """Drop the rows that reach ``x`` or go beyond it."""
        num_rows = len(self.x)
        while num_rows and self.x[num_rows - 1] >= x:
            num_rows -= 1
        del self.x[num_rows:]
        for column in self.columns.values():
            column.cut(num_rows)
        # The row that is left counts as full: it may end before the stride, and nothing is added to it.
        self._num_in_last = self.stride
        self._changed_from = min(self._changed_from, num_rows)

    def merge(self) -> None:
        """Make one row of each two."""
        # The row behind an odd number of rows stays alone, and with it the newest x.
        last = self.x[-1:] if len(self.x) % 2 else array("d")
        self.x = array("d", chain(self.x[1::2], last))
        for column in self.columns.values():
            column.merge()
        self.stride *= 2
        self._num_in_last = self.stride
        # All rows have other numbers now, which the page cannot derive.
        self._changed_from = 0


def plain_numbers(values: Iterable[float], *, digits: int = _DIGITS) -> list[float | None]:
    """Values as JSON has them: none for what is no number, whole numbers without a point."""
    plain: list[float | None] = []
    for value in values:
        if not math.isfinite(value):
            plain.append(None)
            continue
        short = float(f"{value:.{digits}g}")
        # A page's numbers are floating-point ones, which hold whole numbers exactly up to about 9e15.
        is_whole = short.is_integer() and abs(short) < 1e15
        plain.append(int(short) if is_whole else short)
    return plain
