"""The cgroups of the bed, `/bed/BOX` in every v1 hierarchy: the one list of everything that belongs to it.

Every process of the bed enters its freezer cgroup before it becomes what it is; children inherit it. So
nothing has to remember a pid: whoever wants to end the bed kills what is in there, whichever `up` began it
and however that ended.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from bed.places import CGROUPS, NAME
from bed.shell import BedError

HOST = "host"  # the bed's processes that live in no node: helpers, and `up` itself while it works


def hierarchies() -> list[Path]:
    """Every mounted hierarchy: the v1 controllers, the named one, and `unified` where it is mounted."""
    return sorted(
        folder
        for folder in CGROUPS.iterdir()
        if folder.is_dir() and (folder / "cgroup.procs").exists()
    )


def make(box: str) -> None:
    """Create the cgroup of a box, with a `sys` below it for its own daemons, in every hierarchy."""
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
    """The file into which a process of the box writes 0 before anything else."""
    return CGROUPS / "freezer" / NAME / box / "sys" / "cgroup.procs"


def enter(box: str) -> None:
    """Move this process in."""
    make(box)
    entrance(box).write_text(str(os.getpid()))


def leave() -> None:
    """Move this process back to the root: `down` leaves it alone from now on."""
    (CGROUPS / "freezer" / "cgroup.procs").write_text(str(os.getpid()))


def set_frozen(box: str, frozen: bool) -> None:
    """Stop or continue every process of a box, containers included."""
    (CGROUPS / "freezer" / NAME / box / "freezer.state").write_text(
        "FROZEN" if frozen else "THAWED"
    )


def is_frozen(box: str) -> bool:
    """Whether the box is frozen or on its way."""
    return (
        CGROUPS / "freezer" / NAME / box / "freezer.state"
    ).read_text().strip() != "THAWED"


def pids_below(*parts: str, hierarchy: str = "freezer") -> set[int]:
    """The processes of a cgroup and all below it."""
    found: set[int] = set()
    for file in CGROUPS.joinpath(hierarchy, NAME, *parts).glob("**/cgroup.procs"):
        found |= pids_in(file)
    return found


def everything() -> set[int]:
    """Every process that belongs to the bed, in whichever hierarchy it is known."""
    found: set[int] = set()
    for file in CGROUPS.glob(f"*/{NAME}/**/cgroup.procs"):
        found |= pids_in(file)
    return found


def kill(pids: set[int]) -> None:
    """SIGKILL each; one that is gone already is no news."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def end_everything(seconds: float = 60) -> int:
    """Thaw and kill until nothing is left; how many processes that were.

    Raises BedError when some do not go.
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
    """Delete the cgroups, deepest first; the kernel needs a moment after the last process."""
    remove_below(seconds=seconds)


def remove_below(*parts: str, seconds: float = 60) -> None:
    """Delete one of them with all below it, in every hierarchy."""
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
    """The processes of one cgroup; none where it is gone."""
    try:
        return {int(line) for line in file.read_text().split()}
    except OSError:  # removed between the listing and now
        return set()


def _try_write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError:
        return
