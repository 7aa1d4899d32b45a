"""Tokens per second, as every display of a run computes them: from the rows of metrics.jsonl alone."""

from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 60.0
_MOST_POINTS: Final = 200
"""Points of a window, however short its steps are."""


class Throughput:
    """The value of the catalogue's derived column ``tokens_per_second``, row by row.

    It counts wall time, so that evaluations and saves lower it, over the last minute of one generation. It
    reads no clock: a live node, a tracker and a reader of the run's files get the same value for a row.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._total = 0
        self._points: deque[tuple[float, int]] = deque()
        self._is_first = True

    def add(
        self, *, generation: int, tokens: int, step_seconds: float, time: float
    ) -> float:
        """Count a step that ended at Unix time ``time``, and return the throughput as of its end."""
        # Another group, or a clock that was set back: a rate across them would be of neither.
        if generation != self._generation or (self._points and time < self._points[-1][0]):
            self._generation, self._total, self._is_first = generation, 0, True
            self._points.clear()
        if not self._points:
            self._points.append((time - step_seconds, 0))
        elif self._is_first:
            # The first step warms everything up; it would lower the rate for as long as the window is.
            self._points.popleft()
            self._is_first = False

        self._total += tokens
        points = self._points
        if len(points) > 1 and time - points[-2][0] < WINDOW_SECONDS / _MOST_POINTS:
            points.pop()
        points.append((time, self._total))
        while len(points) > 2 and time - points[1][0] > WINDOW_SECONDS:
            points.popleft()

        # Two steps at one reading of a coarse clock have no rate.
        (begun, before), (now, after) = points[0], points[-1]
        return (after - before) / (now - begun) if now > begun else 0.0
