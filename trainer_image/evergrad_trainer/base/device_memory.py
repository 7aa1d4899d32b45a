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


def report_device_memory(
    device: torch.device, on_read: Callable[[Sizes], None] | None
) -> None:
    """Call ``on_read`` with the sizes where ``device`` has an account; nothing is read for nobody."""
    if on_read is not None and (sizes := read_device_memory(device)) is not None:
        on_read(sizes)
