"""Reads the stacks of a run's processes from outside. Each process writes its stacks when it gets a signal.

A process registers a file in memory and a signal handler (:func:`register_stacks`). Any process of the same
user and container finds both in ``/proc``, sends the signal and reads the file (:func:`read_stacks`). The
handler is written in C and needs neither the GIL nor a thread of its own, so that it also works in a
deadlock. Linux only.
"""

import contextlib
import faulthandler
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

STACKS_SIGNAL = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else None
"""A real-time signal, because scripts and their libraries may use SIGUSR1 and SIGUSR2."""
_FILE = "evergrad-stacks"
_LINK = f"/memfd:{_FILE}"
_ANSWER_SECONDS = 5.0
"""Maximum seconds to wait for the stacks. Unless the machine is busy, they are written in milliseconds."""
_NATIVE_SECONDS = 60.0
"""Maximum seconds for a debugger, which has to read some gigabytes of symbols of torch."""
_MOST_BYTES = 256 * 1024
"""Maximum bytes that are read of one process's stacks. faulthandler stops at 100 threads of 100 frames."""
_KEPT_BYTES = 1 << 20
"""Size of a process's file, in bytes, above which earlier answers in it are deleted."""
_MOST_THREADS = 200
"""Maximum number of threads that are listed by name and state."""
_DEBUGGERS = (
    ("eu-stack", ("eu-stack", "-p", "{pid}")),
    ("py-spy", ("py-spy", "dump", "--native", "--nonblocking", "--pid", "{pid}")),
    ("gdb", ("gdb", "-q", "-batch", "-ex", "thread apply all backtrace 40", "-p", "{pid}")),
)
"""Programs that print native stacks, in the order of preference."""

_registered: int | None = None


@dataclass(frozen=True)
class StackProcess:
    """A process that has registered. ``label``: its own description, such as ``rank 1``; may be empty."""

    pid: int
    parent: int
    name: str
    label: str
    file: str
    """Path under ``/proc`` of the file that receives its stacks."""


def register_stacks(label: str = "") -> None:
    """Install a handler that writes this process's stacks into a file in memory at each STACKS_SIGNAL.

    A forked process must register again, because it shares its parent's file until then. For example, call
    ``register_stacks("rank 1")`` at the start of a worker.
    """
    global _registered  # noqa: PLW0603 - one process has one handler of a signal
    if STACKS_SIGNAL is None or not hasattr(os, "memfd_create"):
        return
    # Training also works without the file or the handler, so errors are ignored.
    with contextlib.suppress(OSError, RuntimeError, ValueError):
        file = os.memfd_create(f"{_FILE}:{label}"[:200])
        # Use append mode, so that a reader may truncate the file.
        fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
        if _registered is not None:
            os.close(_registered)
        _registered = file


def find_processes(root: int | None = None) -> list[StackProcess]:
    """Return the registered processes among ``root`` and its descendants; all visible ones if it is None."""
    parents = dict(_list_processes())
    found = []
    for pid in sorted(parents):
        if root is not None and not _descends(pid, root, parents):
            continue
        with contextlib.suppress(OSError):
            if (process := _find_registered(pid, parents[pid])) is not None:
                found.append(process)
    return found


def read_stacks_of(pid: int, *, native: bool = False) -> str:
    """Return the stacks of process ``pid`` and of its registered descendants, as one text."""
    found = find_processes(pid)
    if not any(process.pid == pid for process in found):
        # The process is not a Python program, or a Python program that has not registered.
        native_stacks = read_native_stacks(pid) if native else ""
        head = (
            f"==> pid {pid} <==\n(no Python stacks: it is not a registered Python process)"
        )
        return "\n".join(
            part for part in (head, _describe_threads(pid), native_stacks) if part
        )
    return "\n".join(
        show_stacks(process, native=native and process.pid == pid) for process in found
    )


def read_stacks(process: StackProcess, *, native: bool = False) -> str:
    """Return the stacks of all threads of a process as text; if it does not answer, the reason.

    ``native``: also read the stacks of C and C++, if a debugger is installed. The process is stopped
    meanwhile.
    """
    try:
        text = _ask(process)
    except OSError as error:
        text = f"(no Python stacks: {error.strerror or error})\n"
    parts = [text, _describe_threads(process.pid)]
    if native:
        parts.append(read_native_stacks(process.pid))
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts if part)


def show_stacks(process: StackProcess, *, native: bool = False) -> str:
    """Return the stacks of a process below a heading with its label, name and pid."""
    label = f"{process.label}, " if process.label else ""
    head = f"==> {label}{process.name}, pid {process.pid} <=="
    return f"{head}\n{read_stacks(process, native=native)}"


def read_native_stacks(pid: int) -> str:
    """Return the native stacks of a process from the first debugger that is installed and succeeds.

    If none succeeds, the text contains the reasons.
    """
    said = []
    for name, words in _DEBUGGERS:
        if shutil.which(name) is None:
            continue
        command = [word.format(pid=pid) for word in words]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_NATIVE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            said.append(f"{name}: {error}")
            continue
        text = done.stdout.decode("utf-8", errors="replace")
        if done.returncode == 0 and text.strip():
            return f"native stacks, by {name}:\n{text[:_MOST_BYTES]}"
        last = done.stderr.decode("utf-8", errors="replace").strip().splitlines()[-1:]
        said.append(f"{name}: {last[0] if last else f'exit code {done.returncode}'}")
    names = ", ".join(name for name, _ in _DEBUGGERS)
    why = "; ".join(said) or f"none of {names} is installed"
    return f"(no native stacks: {why})"


def _ask(process: StackProcess) -> str:
    """Send the signal and read what the process writes. Raises OSError."""
    assert STACKS_SIGNAL is not None  # noqa: S101 - without it no process has registered
    file = os.open(process.file, os.O_RDWR | os.O_CLOEXEC)
    try:
        # Send the signal only to a process that handles it, because it would end any other process.
        if not _has_bit(_read_status(process.pid).get("SigCgt", "0")):
            raise OSError(0, "it is about to start another program")
        if os.fstat(file).st_size > _KEPT_BYTES:
            os.ftruncate(file, 0)
        before = os.fstat(file).st_size
        os.kill(process.pid, STACKS_SIGNAL)

        # While the handler writes, the signal is blocked in its thread.
        until = time.monotonic() + _ANSWER_SECONDS
        while os.fstat(file).st_size == before or _is_writing(process.pid):
            if time.monotonic() > until:
                if os.fstat(file).st_size > before:
                    break
                state = _read_status(process.pid).get("State", "?")
                raise OSError(
                    0, f"it has not answered for {_ANSWER_SECONDS:g} s; state {state}"
                )
            time.sleep(0.01)
        return os.pread(file, _MOST_BYTES, before).decode("utf-8", errors="replace")
    finally:
        os.close(file)


def _is_writing(pid: int) -> bool:
    """Return whether the main thread is in the handler, or the signal is still pending. Raises OSError."""
    if _has_bit(_read_status(pid).get("ShdPnd", "0")):
        return True
    # Check only the main thread. Other threads may block the signal permanently; the main thread does not,
    # because Python runs signal handlers there.
    return _has_bit(_read_status(pid, thread=pid).get("SigBlk", "0"))


def _describe_threads(pid: int) -> str:
    """Return one line for each thread: id, name, state, and the kernel function in which it waits."""
    lines = []
    for task in sorted(
        Path(f"/proc/{pid}/task").glob("*"), key=lambda path: int(path.name)
    ):
        with contextlib.suppress(OSError):
            name = (task / "comm").read_text("utf-8", errors="replace").strip()
            state = _read_status(pid, thread=int(task.name)).get("State", "?")
            waits = ""
            with contextlib.suppress(OSError):
                waits = (task / "wchan").read_text("ascii").strip(" 0")
            lines.append(f"  {task.name:>8}  {name:<16}  {state:<22}  {waits}".rstrip())
    more = len(lines) - _MOST_THREADS
    if more > 0:
        lines[_MOST_THREADS:] = [f"  and {more} more"]
    return "\n".join(
        ["threads (id, name, state, kernel function in which it waits):", *lines]
    )


def _list_processes() -> Iterator[tuple[int, int]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text("utf-8", errors="replace").rpartition(")")[2].split()
            yield int(path.parent.name), int(fields[1])


def _descends(pid: int, root: int, parents: dict[int, int]) -> bool:
    # Bound the loop, because the chain of parents may change while it is read.
    for _ in range(len(parents) + 1):
        if pid == root:
            return True
        if pid not in parents:
            return False
        pid = parents[pid]
    return False


def _find_registered(pid: int, parent: int) -> StackProcess | None:
    """Return the process if it has a file of ``register_stacks``, otherwise None. Raises OSError."""
    for number in os.listdir(f"/proc/{pid}/fd"):
        file = f"/proc/{pid}/fd/{number}"
        with contextlib.suppress(FileNotFoundError):
            link = os.readlink(file)
            if link.startswith(_LINK):
                comm = Path(f"/proc/{pid}/comm").read_text("utf-8", errors="replace")
                label = link.removeprefix(_LINK).removesuffix(" (deleted)").lstrip(":")
                return StackProcess(pid, parent, comm.strip(), label, file)
    return None


def _read_status(pid: int, *, thread: int | None = None) -> dict[str, str]:
    """Return the values of ``/proc/PID/status``, or of the thread's status file, by key. Raises OSError."""
    path = f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status"
    lines = Path(path).read_text("utf-8", errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _has_bit(mask: str) -> bool:
    return STACKS_SIGNAL is not None and bool(int(mask, 16) >> (STACKS_SIGNAL - 1) & 1)
