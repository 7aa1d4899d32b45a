"""Memory of its device that this process holds: read where training is, shown where metrics are served."""

from collections.abc import Callable

import torch

KINDS = ("allocated", "reserved", "peak")
"""What is held by tensors now, what torch's allocator holds of the device for them, and the most that tensors
have held."""
Sizes = tuple[int, int, int]
"""Bytes of each kind."""


def read_device_memory(device: torch.device) -> Sizes | None:
    """Bytes of each kind, or None on a device whose allocator keeps no account, as a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.memory_stats(device)
    return (
        found.get("allocated_bytes.all.current", 0),
        found.get("reserved_bytes.all.current", 0),
        found.get("allocated_bytes.all.peak", 0),
    )


class DeviceMemory:
    """Passes the sizes on to whoever watches this process; where nobody does, nothing is read."""

    def __init__(self) -> None:
        self._on_read: Callable[[Sizes], None] | None = None

    def report_to(self, on_read: Callable[[Sizes], None]) -> None:
        """Call ``on_read`` with the sizes after each step, in the thread that trains."""
        self._on_read = on_read

    def note(self, device: torch.device) -> None:
        """A step on ``device`` is over."""
        if self._on_read is None:
            return
        if (sizes := read_device_memory(device)) is not None:
            self._on_read(sizes)


DEVICE_MEMORY = DeviceMemory()
