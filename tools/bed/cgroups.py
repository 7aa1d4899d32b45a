"""The cgroups of the bed, `/bed/BOX` in every v1 hierarchy, which list everything that belongs to the bed.

Every process of the bed enters its freezer cgroup before it starts its program, and child processes inherit
the cgroup. So no component needs to store pids: to end the bed, kill the processes in these cgroups,
regardless of which `up` started them and how it ended.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bed.places import CGROUPS, NAME
from bed.shell import BedError

HOST = "host"  # the bed's processes that belong to no node: helpers, and `up` itself while it works


def hierarchies() -> list[Path]:
    """Return every mounted hierarchy: the v1 controllers, the named one, and `unified` if it is mounted."""
    return sorted(
        folder
        for folder in CGROUPS.iterdir()
        if folder.is_dir() and (folder / "cgroup.procs").exists()
    )


def make(box: str) -> None:
    """Create the cgroup of a box in every hierarchy, with a child `sys` for the box's own daemons."""
    for hierarchy in hierarchies():
        for folder in (
            hierarchy / NAME,
            hierarchy / NAME / box,
            hierarchy / NAME / box / "sys",
        ):
            folder.mkdir(exist_ok=True)
            if hierarchy.name == "cpuset":  # a new cpuset is empty and takes no process
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((folder.parent / file).read_text())


def entrance(box: str) -> Path:
    """Return the file into which a process of the box writes 0 before anything else."""
    return CGROUPS / "freezer" / NAME / box / "sys" / "cgroup.procs"


def enter(box: str) -> None:
    """Move this process into the cgroup of a box."""
    make(box)
    entrance(box).write_text(str(os.getpid()))


def leave() -> None:
    """Move this process back to the root cgroup, so that `down` does not end it."""
    (CGROUPS / "freezer" / "cgroup.procs").write_text(str(os.getpid()))


def set_frozen(box: str, frozen: bool) -> None:
    """Freeze or thaw all processes of a box, including containers."""
    (CGROUPS / "freezer" / NAME / box / "freezer.state").write_text(
        "FROZEN" if frozen else "THAWED"
    )


def is_frozen(box: str) -> bool:
    """Return whether the box is frozen or freezing."""
    return (
        CGROUPS / "freezer" / NAME / box / "freezer.state"
    ).read_text().strip() != "THAWED"


def pids_below(*parts: str, hierarchy: str = "freezer") -> set[int]:
    """Return the processes of a cgroup and its descendants."""
    found: set[int] = set()
    for file in CGROUPS.joinpath(hierarchy, NAME, *parts).glob("**/cgroup.procs"):
        found |= pids_in(file)
    return found


def everything() -> set[int]:
    """Return every process that belongs to the bed in any hierarchy."""
    found: set[int] = set()
    for file in CGROUPS.glob(f"*/{NAME}/**/cgroup.procs"):
        found |= pids_in(file)
    return found


def kill(pids: set[int]) -> None:
    """Send SIGKILL to each process, and ignore processes that have already ended."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_everything(seconds: float = 60) -> int:
    """Thaw and kill until no process is left, and return the number of killed processes.

    Raises BedError if some processes do not end.
    """
    deadline = time.monotonic() + seconds
    killed: set[int] = set()
    while True:
        for state in CGROUPS.glob(
            f"freezer/{NAME}/**/freezer.state"
        ):  # SIGKILL waits while a v1 cgroup is frozen
            _try_write(state, "THAWED")
        pids = everything() - {os.getpid()}
        if not pids:
            return len(killed)
        kill(pids)
        killed |= pids
        if time.monotonic() > deadline:
            raise BedError(f"Processes of the bed do not end: {sorted(pids)}")
        time.sleep(0.02)


def remove(seconds: float = 60) -> None:
    """Delete the cgroups, deepest first. The kernel needs some time after the end of the last process."""
    remove_below(seconds=seconds)


def remove_below(*parts: str, seconds: float = 60) -> None:
    """Delete a cgroup and its descendants in every hierarchy."""
    deadline = time.monotonic() + seconds
    for hierarchy in hierarchies():
        for folder in _deepest_first(hierarchy.joinpath(NAME, *parts)):
            while not _try_remove(folder):
                if time.monotonic() > deadline:
                    raise BedError(f"{folder}: the cgroup cannot be removed.")
                time.sleep(0.02)


def _deepest_first(top: Path) -> Iterator[Path]:
    if not top.is_dir():
        return
    for folder, _, _ in os.walk(top, topdown=False):
        yield Path(folder)


def _try_remove(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def pids_in(file: Path) -> set[int]:
    """Return the processes of one cgroup, or none if it no longer exists."""
    try:
        return {int(line) for line in file.read_text().split()}
    except OSError:  # removed between the listing and now
        return set()


def _try_write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError:
        return
