"""An event loop whose clock jumps to the next due time as soon as nothing is left to do now.

What is tested on it takes no time and never comes too late, however slow or busy the machine is. Only for
code that waits for nothing but the loop's own clock: an answer from a socket would arrive after years.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Selector(selectors.DefaultSelector):
    """Counts the time that a loop would have slept."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0  # a clock that has gone on for a while, as a real one has

    def select(
        self, timeout: float | None = None
    ) -> list[tuple[selectors.SelectorKey, int]]:
        """What is ready.

        With nothing due at all there is nothing to jump to: then it waits as any other does.
        """
        if timeout is None:
            return super().select(None)
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Begins at 1000 s."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds by its own clock."""
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
