"""A log with a bounded number of lines a second: peers that cause lines at will must not fill a disk."""

import time
from collections.abc import Callable

LogLine = Callable[..., None]


class BoundedLog:
    """Passes lines on to a log; of those that a peer can cause at will, only so many a second."""

    def __init__(self, log: LogLine, *, lines_per_second: float) -> None:
        self.say_always = log
        self._rate = lines_per_second
        self._left, self._at = lines_per_second, 0.0

    def say(self, event: str, **fields: object) -> None:
        """Write the line, unless there were too many shortly before."""
        now = time.monotonic()
        self._left = min(4 * self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1:
            self.say_always(event, **fields)
            self._left -= 1
