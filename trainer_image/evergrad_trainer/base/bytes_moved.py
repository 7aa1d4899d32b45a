"""How many bytes of state this process has read or received: what shows that a long start continues."""

from collections.abc import Callable


class BytesMoved:
    """Passes each number of bytes on to whoever watches this process."""

    def __init__(self) -> None:
        self._on_moved: Callable[[int], None] = lambda num_bytes: None

    def report_to(self, on_moved: Callable[[int], None]) -> None:
        """Call ``on_moved`` with each further number of bytes, in the thread that moves them."""
        self._on_moved = on_moved

    def note(self, num_bytes: int) -> None:
        """Count ``num_bytes`` more that are here."""
        self._on_moved(num_bytes)


MOVED = BytesMoved()
"""The count of this process, which restores one state at a time but reads and receives it in many places."""
