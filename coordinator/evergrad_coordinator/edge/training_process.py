"""The record of the process that trains in a run directory: who it is, and whether it is alive.

A process is named by its number, its start and the boot of its machine, so that neither a reused number nor
a reboot makes a process that has ended look alive. Processes of other machines and of other containers are
never alive here, and neither is any process where there is no ``/proc``.
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
"""For another process to read or write its record: milliseconds. A frozen one is not waited for."""
_MOST_BYTES = 4096
"""Of a record: less than 400 bytes."""


@dataclass(frozen=True)
class Owner:
    """A process that trains in a run directory. ``time``: Unix seconds when it began."""

    pid: int
    start_ticks: int
    """Start of the process in the kernel's clock ticks since boot: its number is given out again."""
    boot: str
    pid_namespace: str
    time: float
    host: str

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs, as far as this machine and this container can see."""
        return (self.boot, self.pid_namespace) == _observe_machine() and (
            _read_start_ticks(self.pid) == self.start_ticks
        )


def read_owner(directory: Path) -> Owner | None:
    """Read the record of a run directory; None without one, or where it cannot be read."""
    try:
        with locked_record(directory) as file:
            return parse_owner(file)
    except OSError:
        return None


@contextlib.contextmanager
def locked_record(directory: Path, *, create: bool = False) -> Iterator[int]:
    """Open the record and hold its lock, so that of two processes that start together one sees the other.

    A file system without locks, or a process that is frozen in here, costs that certainty and nothing else.
    Raises OSError.
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
            # Its owner may have removed it at its end meanwhile: then the record would be read by no one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file), path.stat()):
                    yield file
                    return
            if not create:
                raise FileNotFoundError(path)
        finally:
            os.close(file)


def parse_owner(file: int) -> Owner | None:
    """The owner that an open record names; None without one."""
    try:
        return Owner(**json.loads(os.pread(file, _MOST_BYTES, 0)))
    except (ValueError, TypeError):
        # Of another version: its process is taken for one of another machine.
        return None


def write_owner(file: int, owner: Owner) -> None:
    """Replace the owner of an open record. Raises OSError."""
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(asdict(owner)).encode() + b"\n", 0)


def describe_self() -> Owner | None:
    """This process; None where the system does not say enough to recognise it."""
    boot, namespace = _observe_machine()
    ticks = _read_start_ticks(os.getpid())
    if not boot or not namespace or ticks is None:
        return None
    return Owner(os.getpid(), ticks, boot, namespace, time.time(), socket.gethostname())


def _observe_machine() -> tuple[str, str]:
    """The boot of this machine, and the namespace in which the numbers of its processes mean something."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        return boot, os.readlink("/proc/self/ns/pid")
    except OSError:
        return "", ""


def _read_start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not run, or is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", errors="replace")
    except OSError:
        return None
    # The name, in parentheses, may hold anything.
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
