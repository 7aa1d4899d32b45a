"""The state of a process, as the kernel has it."""

import os
from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether a process can still do anything: a dead one that nobody has reaped cannot, though its number is
    still taken."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


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
