"""Reports the bytes of state that this process reads or receives, to show progress during a long start."""

from collections.abc import Callable


class BytesMoved:
    """Forwards each number of bytes to the callback that monitors this process."""

    def __init__(self) -> None:
        self._on_moved: Callable[[int], None] = lambda num_bytes: None

    def report_to(self, on_moved: Callable[[int], None]) -> None:
        """Call ``on_moved`` with each further number of bytes, in the thread that reads or receives them."""
        self._on_moved = on_moved

    def note(self, num_bytes: int) -> None:
        """Report that ``num_bytes`` more bytes have been read or received."""
        self._on_moved(num_bytes)


MOVED = BytesMoved()
"""The reporter of this process. It is global because state is read and received in many modules, and a
process restores only one state at a time."""
