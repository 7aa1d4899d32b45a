"""Reads the device memory that this process holds. The training loop reads it; the metrics server reports
it."""

from collections.abc import Callable

import torch

KINDS = ("allocated", "reserved", "peak")
"""Memory that tensors use now, memory that torch's allocator has reserved on the device, and the largest
amount that tensors have used."""
Sizes = tuple[int, int, int]
"""Bytes of each kind, in the order of ``KINDS``."""


def read_device_memory(device: torch.device) -> Sizes | None:
    """Return the bytes of each kind, or None if the allocator of ``device`` has no statistics (CPU)."""
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
    """Call ``on_read`` with the sizes if ``device`` has statistics. If ``on_read`` is None, read nothing."""
    if on_read is not None and (sizes := read_device_memory(device)) is not None:
        on_read(sizes)
