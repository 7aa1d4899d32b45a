"""Computes tokens per second for every display of a run, only from the rows of metrics.jsonl."""

from collections import deque
from typing import Final

WINDOW_SECONDS: Final = 60.0
_MOST_POINTS: Final = 200
"""Most points of a window, even if steps are very short."""


class Throughput:
    """Computes the catalogue's derived column ``tokens_per_second``, row by row.

    The throughput covers the last minute of one generation. It uses wall time, so evaluations and saves lower
    it. It reads no clock: a live node, a tracker and a reader of the run's files get the same value for a
    row.
    """

    def __init__(self) -> None:
        self._generation: int | None = None
        self._total = 0
        self._points: deque[tuple[float, int]] = deque()
        self._is_first = True

    def add(
        self, *, generation: int, tokens: int, step_seconds: float, time: float
    ) -> float:
        """Count a step that ended at Unix time ``time``, and return the throughput at its end in tokens per
        second."""
        # Start a new window if the group changes or the clock was set back: a rate across both would be
        # wrong.
        if generation != self._generation or (self._points and time < self._points[-1][0]):
            self._generation, self._total, self._is_first = generation, 0, True
            self._points.clear()
        if not self._points:
            self._points.append((time - step_seconds, 0))
        elif self._is_first:
            # Leave out the first step, which includes the warm-up and would lower the rate as long as it is
            # in the window.
            self._points.popleft()
            self._is_first = False

        self._total += tokens
        points = self._points
        if len(points) > 1 and time - points[-2][0] < WINDOW_SECONDS / _MOST_POINTS:
            points.pop()
        points.append((time, self._total))
        while len(points) > 2 and time - points[1][0] > WINDOW_SECONDS:
            points.popleft()

        # Two steps at the same reading of a coarse clock have no rate.
        (begun, before), (now, after) = points[0], points[-1]
        return (after - before) / (now - begun) if now > begun else 0.0
