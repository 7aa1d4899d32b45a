"""The persistent state of the bed: the process that works on it, its profile, and the settings that `down`
restores."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bed.places import CLUSTER, STATE, STATES, work
from bed.shell import BedError

# Settings of the whole machine that the kubelet changes or that many containers need.
SYSCTLS = (
    "vm/overcommit_memory",
    "kernel/panic",
    "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys",
    "kernel/keys/root_maxbytes",
    "fs/inotify/max_user_instances",
)


@dataclass(frozen=True)
class State:
    """A started bed. `down` deletes `work` and `cluster`, and restores `sysctls`."""

    profile: str
    work: str = field(default_factory=lambda: str(work()))
    cluster: str = field(default_factory=lambda: str(CLUSTER))
    sysctls: dict[str, str] = field(
        default_factory=lambda: {
            name: Path("/proc/sys", name).read_text().strip() for name in SYSCTLS
        }
    )
    begun: float = field(default_factory=time.time)
    is_complete: bool = False


def write(state: State, folder: Path = STATE) -> None:
    """Write the state to its file."""
    folder.mkdir(parents=True, exist_ok=True)
    fresh = folder / "state.json.new"
    fresh.write_text(json.dumps(asdict(state), indent=1))
    fresh.replace(folder / "state.json")


def read() -> State:
    """Return the state of the last `up`. Raises BedError if there is none."""
    try:
        return State(**json.loads((STATE / "state.json").read_text()))
    except FileNotFoundError as error:
        raise BedError("No bed is up. Start one: make cluster") from error


def exists() -> bool:
    """Return whether a bed was started and not taken down."""
    return (STATE / "state.json").exists()


def restore_sysctls() -> None:
    """Restore the machine's settings.

    If a bed that started later still exists, keep the settings and write the original values to its state, so
    that its `down` restores them.
    """
    if not exists():
        return
    own = read()
    heirs = [file for file in STATES.glob("*/state.json") if file.parent != STATE]
    younger = [file for file in heirs if json.loads(file.read_text())["begun"] > own.begun]
    for file in younger:
        write(
            replace(State(**json.loads(file.read_text())), sysctls=own.sysctls), file.parent
        )
    for name, value in own.sysctls.items() if not younger else ():
        Path("/proc/sys", name).write_text(value)


def forget() -> None:
    """Delete the state. The lock file stays, because another process may wait for it."""
    shutil.rmtree(STATE / "golden", ignore_errors=True)
    (STATE / "state.json").unlink(missing_ok=True)


@contextmanager
def lock() -> Iterator[None]:
    """Allow one `up` or `down` at a time on the machine. Raises BedError with the holder of the lock.

    The kernel releases the lock when the process ends.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / "lock", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise BedError(
                f"Another `up` or `down` of the bed is at work (pid {file.read().strip()}). Wait for it."
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
