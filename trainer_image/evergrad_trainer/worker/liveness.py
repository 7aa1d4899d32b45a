"""A worker's last signs of life, in memory shared with its supervisor, which can read them after a
SIGKILL."""

import multiprocessing
import time

_STEP, _SLOT, _BEGUN, _LONGEST, _MOVED = range(5)
_MEMORY = slice(5, 8)


class WorkerHeartbeat:
    """The worker's current step and slot, the duration of its longest slot, the bytes of state that it has
    moved, and the device memory that it holds.

    It has one writer and one reader.
    """

    def __init__(self) -> None:
        """Create this in the supervisor, before the worker is started."""
        self._values = multiprocessing.RawArray(
            "d", [-1.0, -1.0, 0.0, 0.0, 0.0] + 3 * [-1.0]
        )

    def beat(self, step: int, slot: int) -> None:
        """Record that the worker begins to compute ``slot`` of ``step``."""
        self.rest()
        self._values[_STEP], self._values[_SLOT] = step, slot
        self._values[_BEGUN] = time.monotonic()

    def rest(self) -> None:
        """Record that the current slot is complete, also on its device; the worker then waits for other
        ranks."""
        if self._values[_BEGUN]:
            self._values[_LONGEST] = max(
                self._values[_LONGEST], time.monotonic() - self._values[_BEGUN]
            )
        self._values[_BEGUN] = 0.0

    def move(self, num_bytes: int) -> None:
        """Record that the worker has read or received ``num_bytes`` more of a state."""
        self._values[_MOVED] += num_bytes

    def hold(self, sizes: tuple[int, int, int]) -> None:
        """Record the device memory that the worker holds, in bytes: see
        :mod:`evergrad_trainer.base.device_memory`."""
        self._values[_MEMORY] = [float(size) for size in sizes]

    @property
    def held_bytes(self) -> tuple[int, int, int] | None:
        """Device memory that the worker last reported, in bytes; None before the first report, and on a
        CPU."""
        allocated, reserved, peak = (int(size) for size in self._values[_MEMORY])
        return None if min(allocated, reserved, peak) < 0 else (allocated, reserved, peak)

    @property
    def moved_bytes(self) -> int:
        """Bytes of all states that the worker has read or received so far."""
        return int(self._values[_MOVED])

    @property
    def step(self) -> int:
        """The step that began last; -1 before the first."""
        return int(self._values[_STEP])

    @property
    def slot(self) -> int:
        """The slot that began last; -1 before the first."""
        return int(self._values[_SLOT])

    @property
    def longest_slot_seconds(self) -> float:
        """Duration of the longest slot so far, in seconds; 0 before the first."""
        return float(self._values[_LONGEST])

    @property
    def is_in_first_slot(self) -> bool:
        """Whether the worker or its device computes the first slot, so that a slot's duration is not known
        yet."""
        return bool(self._values[_BEGUN]) and not self._values[_LONGEST]
