"""A series of bounded size: rows of values over an increasing ``x``, which are merged in pairs if too many.

Pure. A row is one reading, or the mean, minimum and maximum of several neighbouring readings.
"""

import math
from array import array
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

MOST_ROWS = 600
"""Maximum number of rows. After a merge 300 are left, which is enough for the width of the page's plots."""
MOST_COLUMNS = 40
"""Maximum number of columns: the columns of every run, and the 32 metrics that a recipe may declare."""
_DIGITS = 6
"""Significant digits of a value that is sent."""


class _Column:
    """One column over all rows: mean, minimum, maximum, and number of readings of each row."""

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
        # Update a running mean, because a sum would lose precision as it grows.
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
                # If one row of the pair is missing or empty, the result is the other row.
                if row >= len(self.num) or not self.num[row]:
                    continue
                if not merged.num[-1]:
                    merged.mean[-1] = self.mean[row]
                    merged.least[-1] = self.least[row]
                    merged.most[-1] = self.most[row]
                merged.num[-1] += self.num[row]
                # Weight by the number of readings, because a late column has rows with fewer readings.
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
    """Rows of readings over an increasing ``x``.

    If a reading has a smaller ``x``, it replaces the rows from there on. For example, this happens when
    training repeats steps after a restart.
    """

    def __init__(self) -> None:
        self.stride = 1
        """Number of readings of a full row. Each merge doubles it."""
        self.x = array("d")
        """``x`` of the newest reading of each row."""
        self.columns: dict[str, _Column] = {}
        self._num_in_last = 0
        self._changed_from = 0
        """Index of the first row that has changed since the last ``take_change``."""

    def add(self, x: float, values: Mapping[str, float]) -> None:
        """Add one reading. New names beyond MOST_COLUMNS are ignored."""
        # For a step that is trained again, the last reading counts, as in metrics.jsonl.
        if self.x and x <= self.x[-1]:
            self.cut(x)

        # If the last row is full or there is none, start a new row. Merge first if there are too many rows.
        if not self.x or self._num_in_last >= self.stride:
            if len(self.x) >= MOST_ROWS:
                self.merge()
            self.x.append(x)
            for column in self.columns.values():
                column.append_empty()
            self._num_in_last = 0
        self.x[-1] = x
        self._num_in_last += 1
        # Send the newest row again, because it may have been sent with fewer readings.
        self._changed_from = min(self._changed_from, len(self.x) - 1)

        for name, value in values.items():
            if name not in self.columns:
                if len(self.columns) >= MOST_COLUMNS:
                    continue
                # Send all earlier rows again, with empty values of the new column.
                self.columns[name] = _Column(len(self.x))
                self._changed_from = 0
            self.columns[name].add(value)

    def rewind(self) -> None:
        """Make the next ``take_change`` return all rows."""
        self._changed_from = 0

    def take_change(self) -> dict[str, Any] | None:
        """Return the rows that have changed since the last call, as JSON values, or None.

        ``from`` is the number of rows before the changed rows. Each column has the lists of means, minima and
        maxima.
        """
        begin, self._changed_from = self._changed_from, len(self.x)
        if begin >= len(self.x):
            return None
        columns = {}
        for name, one in self.columns.items():
            parts = (one.mean, one.least, one.most)
            columns[name] = [plain_numbers(part[begin:]) for part in parts]
        # Use more digits than for values, because a step of a long run must not be rounded to another step.
        x = plain_numbers(self.x[begin:], digits=12)
        return {
            "from": begin,
            "x": x,
            "columns": columns,
        }

    def cut(self, x: float) -> None:
        """Drop the rows whose ``x`` is at or above this ``x``."""
        num_rows = len(self.x)
        while num_rows and self.x[num_rows - 1] >= x:
            num_rows -= 1
        del self.x[num_rows:]
        for column in self.columns.values():
            column.cut(num_rows)
        # Treat the last remaining row as full, so that no reading is added to it.
        self._num_in_last = self.stride
        self._changed_from = min(self._changed_from, num_rows)

    def merge(self) -> None:
        """Make one row of each two."""
        # If the number of rows is odd, the last row stays single and keeps its x.
        last = self.x[-1:] if len(self.x) % 2 else array("d")
        self.x = array("d", chain(self.x[1::2], last))
        for column in self.columns.values():
            column.merge()
        self.stride *= 2
        self._num_in_last = self.stride
        # Send all rows again, because the page cannot compute the merged values.
        self._changed_from = 0


def plain_numbers(values: Iterable[float], *, digits: int = _DIGITS) -> list[float | None]:
    """Return values for JSON: None for NaN and infinity, whole numbers as int, others rounded to ``digits``.

    For example, ``[1.0, nan, 0.12345678]`` becomes ``[1, None, 0.123457]``.
    """
    plain: list[float | None] = []
    for value in values:
        if not math.isfinite(value):
            plain.append(None)
            continue
        short = float(f"{value:.{digits}g}")
        # The page's numbers are 64-bit floats, which represent whole numbers exactly up to about 9e15.
        is_whole = short.is_integer() and abs(short) < 1e15
        plain.append(int(short) if is_whole else short)
    return plain
