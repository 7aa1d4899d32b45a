"""A worker's last signs of life, in memory that its supervisor shares: they can be read after a SIGKILL."""

import multiprocessing
import time

_STEP, _SLOT, _BEGUN, _LONGEST, _MOVED = range(5)
_MEMORY = slice(5, 8)


class WorkerHeartbeat:
    """Which step and slot a worker computes, how long its longest slot took, how much state it has moved, and
    how much memory of its device it holds.

    One writer, one reader.
    """

    def __init__(self) -> None:
        """In the supervisor, before the worker is started."""
        self._values = multiprocessing.RawArray(
            "d", [-1.0, -1.0, 0.0, 0.0, 0.0] + 3 * [-1.0]
        )

    def beat(self, step: int, slot: int) -> None:
        """The worker is about to compute ``slot`` of ``step``."""
        self.rest()
        self._values[_STEP], self._values[_SLOT] = step, slot
        self._values[_BEGUN] = time.monotonic()

    def rest(self) -> None:
        """The slot that was begun last is over, also on its device; what follows is a wait for others."""
        if self._values[_BEGUN]:
            self._values[_LONGEST] = max(
                self._values[_LONGEST], time.monotonic() - self._values[_BEGUN]
            )
        self._values[_BEGUN] = 0.0

    def move(self, num_bytes: int) -> None:
        """The worker has read or received so many bytes more of a state."""
        self._values[_MOVED] += num_bytes

    def hold(self, sizes: tuple[int, int, int]) -> None:
        """The worker holds so many bytes of its device: see :mod:`evergrad_trainer.base.device_memory`."""
        self._values[_MEMORY] = [float(size) for size in sizes]

    @property
    def held_bytes(self) -> tuple[int, int, int] | None:
        """Memory of the device, as the worker said last; None before, and on a CPU."""
        allocated, reserved, peak = (int(size) for size in self._values[_MEMORY])
        return None if min(allocated, reserved, peak) < 0 else (allocated, reserved, peak)

    @property
    def moved_bytes(self) -> int:
        """Bytes of all states so far."""
        return int(self._values[_MOVED])

    @property
    def step(self) -> int:
        """The step that was begun last; -1 before the first."""
        return int(self._values[_STEP])

    @property
    def slot(self) -> int:
        """The slot that was begun last; -1 before the first."""
        return int(self._values[_SLOT])

    @property
    def longest_slot_seconds(self) -> float:
        """Longest time of all slots so far; 0 before the first."""
        return float(self._values[_LONGEST])

    @property
    def is_in_first_slot(self) -> bool:
        """Whether it computes, or its device does, and how long that takes is not known yet."""
        return bool(self._values[_BEGUN]) and not self._values[_LONGEST]
