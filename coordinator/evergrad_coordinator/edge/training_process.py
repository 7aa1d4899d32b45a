"""Records the process that trains in a run directory, and checks whether it is alive.

A process is identified by its pid, its start time and the boot of its machine. Therefore neither a reused pid
nor a reboot makes an ended process look alive. A process of another machine or container never counts as
alive, and on a system without ``/proc`` no process does.
"""

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from evergrad_common.contract import RunFile

_LOCK_SECONDS = 2.0
"""Maximum seconds to wait for the lock.

Another process holds it for milliseconds. If that process is frozen, the wait ends without the lock.
"""
_MOST_BYTES = 4096
"""Maximum number of bytes that are read of a record. A record has less than 400 bytes."""


@dataclass(frozen=True)
class Owner:
    """A process that trains in a run directory. ``time``: Unix time of the record, in seconds."""

    pid: int
    start_ticks: int
    """Start of the process in clock ticks since boot. It is needed because the kernel reuses pids."""
    boot: str
    pid_namespace: str
    time: float
    host: str

    @property
    def is_alive(self) -> bool:
        """Whether exactly this process is running on this machine and in this container."""
        return (self.boot, self.pid_namespace) == _observe_machine() and (
            _read_start_ticks(self.pid) == self.start_ticks
        )


def read_owner(directory: Path) -> Owner | None:
    """Return the recorded process of a run directory, or None."""
    try:
        with locked_record(directory) as file:
            return parse_owner(file)
    except OSError:
        return None


@contextlib.contextmanager
def locked_record(directory: Path, *, create: bool = False) -> Iterator[int]:
    """Open the record and hold its lock. If two processes start together, one reads the other's record.

    If the file system has no locks, or a frozen process holds the lock, the block runs without the lock.
    Raises OSError if the record cannot be opened, for example because it does not exist.
    """
    path = directory / RunFile.OWNER
    until = time.monotonic() + _LOCK_SECONDS
    while True:
        file = os.open(
            path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o666
        )
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() < until:
                        time.sleep(0.01)
                        continue
                except OSError:
                    pass
                break
            # The owner may have removed the file since it was opened. Other processes would not read it.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    yield file
                    return
            if not create:
                raise FileNotFoundError(path)
        finally:
            os.close(file)


def parse_owner(file: int) -> Owner | None:
    """Return the owner of an open record, or None."""
    try:
        return Owner(**json.loads(os.pread(file, _MOST_BYTES, 0)))
    except (ValueError, TypeError):
        # The record may be of another version. Its process then counts as not alive.
        return None


def write_owner(file: int, owner: Owner) -> None:
    """Replace the owner of an open record. Raises OSError."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(owner)).encode() + b"\n", 0)


def describe_self() -> Owner | None:
    """Return the record of this process, or None if the system does not provide all its values."""
    boot, namespace = _observe_machine()
    ticks = _read_start_ticks(os.getpid())
    if not boot or not namespace or ticks is None:
        return None
    return Owner(os.getpid(), ticks, boot, namespace, time.time(), socket.gethostname())


def _observe_machine() -> tuple[str, str]:
    """Return the boot id of this machine and the pid namespace of this process; "" and "" without /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _read_start_ticks(pid: int) -> int | None:
    """Return the start of a process in clock ticks since boot; None if it is not running or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    # The process name is in parentheses and may contain any characters, including parentheses.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
