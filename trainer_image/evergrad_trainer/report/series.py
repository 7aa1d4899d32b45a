"""Thins curves out for drawing: a million steps become a few hundred points that look the same. Pure.

Pictures have points of ``envelope`` and ``means``; charts have ``SeriesRows``, which all charts
of a page share.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Reals = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Parts = tuple[Reals, ...]
"""A curve of a chart: one value for each row, optionally with the minimum and the maximum of each row."""

MOST_ROWS = 1000
"""Rows of a chart: about one for each pixel of its width on a wide page."""


@dataclass(frozen=True)
class Curve:
    """Points to connect; a y of NaN breaks the line."""

    x: Reals
    y: Reals

    def __len__(self) -> int:
        return len(self.x)


def envelope(x: Integers, y: Reals, *, points: int = 700) -> Curve:
    """Keep every point, or the lowest and the highest of each of ``points`` / 2 spans: no spike
    disappears."""
    if len(x) <= points:
        return Curve(x.astype(np.float64), y)
    picked: list[int] = []
    # Keep the extremes of each span in their order, because means would hide spikes.
    for begin, end in _spans(len(x), points // 2):
        part = y[begin:end]
        if np.isnan(part).all():
            # One NaN keeps the gap.
            picked.append(begin)
            continue
        lowest = begin + int(np.nanargmin(part))
        highest = begin + int(np.nanargmax(part))
        picked += sorted({lowest, highest})
    return Curve(x[picked].astype(np.float64), y[picked])


def means(x: Integers, y: Reals, *, points: int = 300) -> Curve:
    """Keep every point, or the mean of each of ``points`` spans at its middle; NaN values are ignored."""
    if len(x) <= points:
        return Curve(x.astype(np.float64), y)
    middles: list[float] = []
    values: list[float] = []
    for begin, end in _spans(len(x), points):
        part = y[begin:end]
        finite = part[np.isfinite(part)]
        middles.append(float(x[begin:end].mean()))
        # A span without a finite value leaves a gap.
        values.append(float(finite.mean()) if len(finite) else np.nan)
    return Curve(np.array(middles), np.array(values))


def _spans(length: int, number: int) -> list[tuple[int, int]]:
    return [(int(begin), int(end)) for begin, end in pairwise(_edges(length, number))]


def _edges(length: int, number: int) -> Integers:
    # The edges of spans with equal numbers of steps. The first span begins at 0, and the last ends at the
    # end.
    return np.linspace(0, length, min(number, length) + 1).astype(np.int64)


def smooth(y: Reals, window: int) -> Reals:
    """Return the centred moving mean over ``window`` values, ignoring values that are not finite; windows are
    shorter at the ends.

    A centred mean does not lag behind the values.
    """
    is_finite = np.isfinite(y)
    # Sum in long doubles, so that one huge value does not reduce the precision of all later sums.
    summed = np.cumsum(np.where(is_finite, y, 0.0), dtype=np.longdouble)
    sums = np.concatenate([[0.0], summed])
    counts = np.concatenate([[0], np.cumsum(is_finite)])

    # Windows are shorter at the ends, where half of their steps do not exist.
    places = np.arange(len(y))
    half = window // 2
    begins = np.maximum(0, places - half)
    ends = np.minimum(len(y), places + half + 1)
    number = counts[ends] - counts[begins]
    total = sums[ends] - sums[begins]

    # Windows without a finite value divide by zero and become gaps.
    with np.errstate(invalid="ignore", divide="ignore"):
        result = np.where(number > 0, total / number, np.nan)
    return result.astype(np.float64)


def broken(x: Integers, y: Reals) -> Curve:
    """Break the curve if a step does not follow the previous step, because another attempt begins there."""
    cuts = np.nonzero(np.diff(x) != 1)[0] + 1
    # Insert NaN between two points to break the line.
    places = np.insert(x.astype(np.float64), cuts, np.nan)
    values = np.insert(y, cuts, np.nan)
    return Curve(places, values)


@dataclass(frozen=True)
class SeriesRows:
    """Rows of a chart over ascending ``steps``: one per step, or one for each of MOST_ROWS spans of steps.

    A row of several steps is at the last of them, as on the live page.
    """

    steps: Integers

    @property
    def x(self) -> Reals:
        """Step of each row."""
        return self.steps[_edges(len(self.steps), MOST_ROWS)[1:] - 1].astype(np.float64)

    def means(self, y: Reals) -> Parts:
        """Return the mean of the finite values of each row."""
        return self.bands(y)[:1]

    def bands(self, y: Reals) -> Parts:
        """Return mean, minimum and maximum of each row."""
        return self.scattered(self.steps, y)

    def scattered(self, steps: Integers, y: Reals) -> Parts:
        """Return mean, minimum and maximum of each row. A step may have any number of values. Values of steps
        after the last row are left out."""
        x = self.x
        row = np.searchsorted(x, steps)
        is_known = np.isfinite(y) & (row < len(x))
        row, y = row[is_known], y[is_known]
        number = np.bincount(row, minlength=len(x))
        total = np.bincount(row, weights=y, minlength=len(x))
        least, most = np.full(len(x), np.inf), np.full(len(x), -np.inf)
        np.minimum.at(least, row, y)
        np.maximum.at(most, row, y)

        # Rows without a finite value are gaps.
        values = (total / np.maximum(number, 1), least, most)
        mean, least, most = (np.where(number > 0, one, np.nan) for one in values)
        # Return only the values if no row has more than one.
        return (mean, least, most) if number.max(initial=0) > 1 else (mean,)
