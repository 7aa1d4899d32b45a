"""Facts of this machine: cores, memory, free space, compiler. Read once, at the edge."""

import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"), Path("/dev/dxg"))
"""Devices of the drivers of NVIDIA, of AMD, and of either under Windows."""


@dataclass(frozen=True)
class Machine:
    """``memory_bytes`` is what a process may use (the smaller of the machine's available memory and the
    container's limit)."""

    cores: int
    memory_bytes: int | None
    num_accelerators: int
    accelerator_memory_bytes: int | None
    has_cpp_compiler: bool


def observe_machine(
    *, num_accelerators: int = 0, accelerator_memory_bytes: int | None = None
) -> Machine:
    """Look at this machine.

    The accelerator's facts come from the caller: only ``distributed.py`` may touch a device.
    """
    return Machine(
        cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        num_accelerators=num_accelerators,
        accelerator_memory_bytes=accelerator_memory_bytes,
        has_cpp_compiler=has_cpp_compiler(),
    )


def usable_cores() -> int:
    """The cores that this process may use, which in a container are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory_bytes() -> int | None:
    """Memory that a process may use here, in bytes; None where it cannot be known."""
    # In a container the machine's memory says little: the smallest of all limits is what kills a process.
    available = _available_memory()
    limits = [] if available is None else [available]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="ascii").strip()
            # A control group without a limit says "max", or a number near 2**63.
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text))
    return min(limits) if limits else None


def has_accelerator_driver() -> bool:
    """Whether this machine may have accelerators, without importing torch: a driver's device is there."""
    return any(path.exists() for path in _DRIVERS)


def has_cpp_compiler() -> bool:
    """Whether kernels can be built here: by inductor, or by Triton, which builds its driver's stub."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def free_bytes(path: Path) -> int:
    """Free space of the file system that holds ``path`` or its nearest existing parent."""
    existing = next(
        parent for parent in (path, *path.absolute().parents) if parent.exists()
    )
    return shutil.disk_usage(existing).free


def _available_memory() -> int | None:
    """Return the bytes that new processes could have without swapping; None where Linux does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    facts = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return int(facts["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in facts else None


def process_start_time() -> float:
    """When this process began, Unix seconds: imports that ran before any of our code count as
    start-up too."""
    # Ticks since the machine started: the kernel has no other time of a process's start.
    try:
        fields = (
            Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        )
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return time.time()
    return time.time() - (up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
