"""A log with a bounded rate of lines, because peers that cause lines must not be able to fill a disk."""

import time
from collections.abc import Callable

LogLine = Callable[..., None]


class BoundedLog:
    """Passes lines to a log. ``say`` is limited to ``lines_per_second``; ``say_always`` has no limit."""

    def __init__(self, log: LogLine, *, lines_per_second: float) -> None:
        self.say_always = log
        self._rate = lines_per_second
        self._left, self._at = lines_per_second, 0.0

    def say(self, event: str, **fields: object) -> None:
        """Write the line, unless the limit is exceeded. The limit allows bursts of 4 s of lines."""
        now = time.monotonic()
        self._left = min(4 * self._rate, self._left + (now - self._at) * self._rate)
        self._at = now
        if self._left >= 1:
            self.say_always(event, **fields)
            self._left -= 1
