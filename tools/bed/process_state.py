"""The state of a process, as the kernel has it."""

import contextlib
import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process can still do anything: a dead one that nobody has reaped cannot, though its number is
    still taken.

    One whose first thread has ended is alive while another thread is, as for a moment behind SIGKILL: it
    holds its files and ports until then.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False
    for thread in threads:
        with contextlib.suppress(OSError):
            state = (thread / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                return True
    return False


def children_of(pid: int) -> list[int]:
    """The children of a process's first thread, dead ones that are not reaped too; none where there is no
    such process."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def workers_of(pid: int) -> list[int]:
    """The children of a node but for its own helpers, which are in its process group."""
    found = []
    for child in children_of(pid):
        try:
            if os.getpgid(child) != os.getpgid(pid):
                found.append(child)
        except ProcessLookupError:
            pass
    return found
