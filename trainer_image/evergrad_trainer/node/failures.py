"""Describes why a worker process ended, and writes the cause for Kubernetes."""

import contextlib
import signal
from pathlib import Path

from evergrad_common.causes import BreakCause
from evergrad_common.contract import ErrorKind, encode_termination
from evergrad_coordinator.protocol import Broken

_CGROUP = Path("/sys/fs/cgroup")
_KINDS: dict[BreakCause, ErrorKind] = {
    "environment": ErrorKind.ENVIRONMENT,
    "numeric": ErrorKind.NUMERIC,
    "peer_lost": ErrorKind.PEER,
}


def describe_end(exit_code: int, *, was_oom: bool) -> str:
    """Describe an exit code of multiprocessing, in which a negative number is a signal.

    For example, -9 returns ``was killed by SIGKILL``.
    """
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


def kind_of(broken: Broken) -> ErrorKind:
    """Return the kind of error that broke a group."""
    return (
        ErrorKind.INPUT if broken.is_final else _KINDS.get(broken.cause, ErrorKind.INTERNAL)
    )


def count_oom_kills(cgroup: Path = _CGROUP) -> int | None:
    """Return how many processes of this container the kernel has killed because memory ran out.

    Returns None if the control group does not report the number.
    """
    for name in ("memory.events", "memory/memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            for line in (cgroup / name).read_text("ascii").splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return None


def write_termination_message(
    path: Path | None, kind: ErrorKind, text: str, trouble: str = ""
) -> None:
    """Write the root cause to the termination log ``path`` that Kubernetes reads.

    If the file cannot be written, the node continues. ``trouble`` is an item of ``causes.TROUBLES`` if a
    volume is the reason, and empty otherwise.
    """
    if path is not None and text:
        with contextlib.suppress(OSError):
            path.write_bytes(encode_termination(kind, text, trouble))
