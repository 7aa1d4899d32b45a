"""Records which ``evergrad run`` of this machine trains in a run directory, and refuses a second one.

The record names a process by its number, its start and the boot of its machine, so that neither a reused
number nor a reboot makes a process that has ended look alive. Processes of other machines and of other
containers are not looked for: there the newest one wins, by its claim on the checkpoints. The same holds
without ``/proc``.
"""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from evergrad_coordinator.contract import RunFile
from evergrad_manifest.errors import Problem
from evergrad_trainer.errors import RunDirectoryError
from evergrad_trainer.run_directory import RunDirectory, parse_object

TAKE_OVER = "--take-over"
_LOCK_SECONDS = 2.0
"""For another process to read or write its record: milliseconds. A frozen one is not waited for."""
_TAIL_BYTES = 1 << 16
"""The end of ``metrics.jsonl`` that is read for its last row. A row has less than 4 KiB."""
_KILL_SECONDS = 10.0
"""For a process to end after SIGKILL, with all that it started."""


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


@contextlib.contextmanager
def own_run_directory(directory: RunDirectory) -> Iterator[None]:
    """Record this process as the one that trains in ``directory`` for as long as the body runs.

    Raises RunDirectoryError if another process of this machine trains there. A directory in which no record
    can be written is used without one: what is wrong with it is reported by its own checks.
    """
    owner = _describe_self()
    if owner is not None:
        with contextlib.suppress(OSError):
            directory.path.mkdir(parents=True, exist_ok=True)
            with _locked(_path_of(directory), create=True) as file:
                _refuse_living(directory, _parse(file))
                _write(file, owner)
    try:
        yield
    finally:
        # A later process may own it by now.
        if owner is not None:
            with contextlib.suppress(OSError), _locked(_path_of(directory)) as file:
                if _parse(file) == owner:
                    _path_of(directory).unlink(missing_ok=True)


def refuse_second_run(directory: RunDirectory) -> None:
    """Raise RunDirectoryError if another process of this machine trains in ``directory``. Writes nothing."""
    _refuse_living(directory, read_owner(directory))


def take_over(directory: RunDirectory, *, grace_seconds: float) -> None:
    """End the process of this machine that trains in ``directory``, if there is one, and wait for its end.

    SIGTERM asks it to save its state and to leave; SIGKILL ends it after ``grace_seconds``. Raises
    RunDirectoryError if it may not be signalled, or does not end.
    """
    owner = read_owner(directory)
    if owner is None or not owner.is_alive:
        return
    where = str(directory.path)
    try:
        # The descriptor means this process even if its number is given out again.
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        if not owner.is_alive:
            return
        for number, seconds, what in (
            (signal.SIGTERM, grace_seconds, "is asked to save and to leave"),
            (
                signal.SIGKILL,
                _KILL_SECONDS,
                f"has not left within {grace_seconds:g} s and is killed",
            ),
        ):
            print(
                f"pid {owner.pid}, which trains this run, {what}",
                file=sys.stderr,
                flush=True,
            )
            signal.pidfd_send_signal(process, number)
            if select.select([process], [], [], seconds)[0]:
                return
    except PermissionError as error:
        what, why = f"pid {owner.pid} cannot be ended", "it belongs to another user"
        remedy = "Let its user stop it"
        raise RunDirectoryError(Problem(where, what, why, remedy)) from error
    except ProcessLookupError:
        return
    finally:
        os.close(process)
    what, why = f"pid {owner.pid} does not end", "a device or a file system keeps it"
    raise RunDirectoryError(Problem(where, what, why, "Wait for its end, and start again"))


def read_owner(directory: RunDirectory) -> Owner | None:
    """Read the record of ``directory``; None without one, or where it cannot be read."""
    try:
        with _locked(_path_of(directory)) as file:
            return _parse(file)
    except OSError:
        return None


def _refuse_living(directory: RunDirectory, owner: Owner | None) -> None:
    if owner is None or not owner.is_alive:
        return
    step = _read_last_step(directory)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.time))
    at = "before its first recorded step" if step is None else f"at step {step}"
    raise RunDirectoryError(
        Problem(
            str(directory.path),
            f"pid {owner.pid} trains this run already, {at}, since {began}",
            "two processes would train the same steps",
            f"Wait for its end, stop it with `kill {owner.pid}` (it saves its state), or start this one with "
            f"{TAKE_OVER}, which does so first",
        )
    )


def _read_last_step(directory: RunDirectory) -> int | None:
    """The step of the newest row of ``metrics.jsonl``; None where there is none."""
    try:
        with directory.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    rows = (parse_object(line) for line in reversed(lines))
    steps = (row.get("step") for row in rows if row is not None)
    return next((step for step in steps if isinstance(step, int)), None)


def _path_of(directory: RunDirectory) -> Path:
    return directory.path / RunFile.OWNER


@contextlib.contextmanager
def _locked(path: Path, *, create: bool = False) -> Iterator[int]:
    """Open the record and hold its lock, so that of two processes that start together one sees the other.

    A file system without locks, or a process that is frozen in here, costs that certainty and nothing else.
    Raises OSError.
    """
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


def _parse(file: int) -> Owner | None:
    value = parse_object(os.pread(file, _TAIL_BYTES, 0))
    try:
        return None if value is None else Owner(**value)
    except TypeError:
        # Of another version: its process is taken for one of another machine.
        return None


def _write(file: int, owner: Owner) -> None:
    values: dict[str, Any] = asdict(owner)
    os.ftruncate(file, 0)
    os.pwrite(file, json.dumps(values).encode() + b"\n", 0)


def _describe_self() -> Owner | None:
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
