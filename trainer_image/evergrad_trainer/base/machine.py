"""Facts about this machine: cores, memory, free space, compiler. They are read once, outside the core."""

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
"""Device files of the NVIDIA driver, the AMD driver, and either driver under Windows (WSL)."""


@dataclass(frozen=True)
class Machine:
    """The resources of one machine.

    ``memory_bytes`` is the memory that a process may use: the smaller of the machine's available memory and
    the container's limit, or None if neither is known.
    """

    cores: int
    memory_bytes: int | None
    num_accelerators: int
    accelerator_memory_bytes: int | None
    has_cpp_compiler: bool


def observe_machine(
    *, num_accelerators: int = 0, accelerator_memory_bytes: int | None = None
) -> Machine:
    """Return the facts about this machine.

    The caller provides the accelerator's facts, because only ``distributed/`` may initialise a device.
    """
    return Machine(
        cores=usable_cores(),
        memory_bytes=usable_memory_bytes(),
        num_accelerators=num_accelerators,
        accelerator_memory_bytes=accelerator_memory_bytes,
        has_cpp_compiler=has_cpp_compiler(),
    )


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    In a container, this number can be smaller than the number of cores of the machine.
    """
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_memory_bytes() -> int | None:
    """Return the memory that a process may use, in bytes; None if it cannot be determined."""
    # In a container, the kernel kills a process that exceeds the smallest of all limits.
    available = _available_memory()
    limits = [] if available is None else [available]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError):
            text = path.read_text(encoding="ascii").strip()
            # A control group without a limit contains "max" or a number near 2**63.
            if text.isdigit() and int(text) < 2**60:
                limits.append(int(text))
    return min(limits) if limits else None


def has_accelerator_driver() -> bool:
    """Return whether a driver's device file exists, which is a check for accelerators without torch."""
    return any(path.exists() for path in _DRIVERS)


def has_cpp_compiler() -> bool:
    """Return whether a C++ compiler exists. Inductor compiles kernels, and Triton compiles a driver stub."""
    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def free_bytes(path: Path) -> int:
    """Return the free bytes of the file system of ``path`` or of its nearest existing parent."""
    existing = next(
        parent for parent in (path, *path.absolute().parents) if parent.exists()
    )
    return shutil.disk_usage(existing).free


def _available_memory() -> int | None:
    """Return the bytes that new processes could use without swapping; None if Linux does not report it."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    facts = {key: value for key, _, value in (line.partition(":") for line in lines)}
    return int(facts["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in facts else None


def process_start_time() -> float:
    """Return the start time of this process in Unix seconds.

    Use this time to include imports that ran before Evergrad's code in the start-up time.
    """
    # The kernel reports the start of a process only in clock ticks since the machine booted.
    try:
        fields = (
            Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        )
        up = float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
    except OSError:
        return time.time()
    return time.time() - (up - int(fields[19]) / os.sysconf("SC_CLK_TCK"))
