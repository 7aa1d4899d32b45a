"""An event loop whose clock jumps to the next due time when no callback is ready.

Tests on it need no real time and do not depend on the machine's speed. Use it only for code that waits for
nothing except the loop's clock: while a socket waits for an answer, the clock could advance by years.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Advances the clock by the time that the loop would sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # like a real clock, not 0

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the ready file objects.

        If no timer is scheduled, wait as a normal selector does.
        """
        if timeout is None:
            return super().select(None)
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock starts at 1000 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the seconds of the virtual clock."""
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` as ``asyncio.run`` does, on a virtual clock."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
