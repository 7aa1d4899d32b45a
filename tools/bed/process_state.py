"""Reads the state of processes from the kernel."""

import contextlib
import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Return whether a process can still run. A zombie cannot, although its number is still in use.

    A process whose first thread has ended is alive while another thread runs, for example for a short time
    after SIGKILL: until then it holds its files and ports.
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
    """Return the children of a process's first thread, including zombies, or nothing."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(word) for word in text.split()]


def workers_of(pid: int) -> list[int]:
    """Return the children of a node, except its own helpers, which are in its process group."""
    found = []
    for child in children_of(pid):
        try:
            if os.getpgid(child) != os.getpgid(pid):
                found.append(child)
        except ProcessLookupError:
            pass
    return found
