"""What the end of a worker process says: by which signal, for want of memory, with which last words."""

import contextlib
import signal
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
MAX_BYTES = 4096
"""What Kubernetes keeps of a container's termination message."""


def describe_end(exit_code: int, *, was_oom: bool) -> str:
    """An exit code as multiprocessing tells it (negative: a signal), as words."""
    if was_oom:
        return "was killed because the node ran out of memory"
    if exit_code < 0:
        try:
            return f"was killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"was killed by signal {-exit_code}"
    if exit_code == 0:
        return "ended with exit code 0 before the run was over"
    return f"ended with exit code {exit_code}"


def count_oom_kills(cgroup: Path = _CGROUP) -> int | None:
    """Processes of this container the kernel has killed for want of memory so far; None where it does not say."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (cgroup / name).read_text("ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return None


def termination_message(text: str) -> bytes:
    """The end of ``text``, where the cause stands, within what Kubernetes keeps."""
    data = text.strip().encode("utf-8", errors="replace")
    return data if len(data) <= MAX_BYTES else data[:1024].rstrip() + b"\n...\n" + data[-(MAX_BYTES - 1030) :].lstrip()


def write_termination_message(path: Path, text: str) -> None:
    """Leave the root cause where Kubernetes looks for it. A node that cannot is none the worse."""
    with contextlib.suppress(OSError):
        path.write_bytes(termination_message(text))
