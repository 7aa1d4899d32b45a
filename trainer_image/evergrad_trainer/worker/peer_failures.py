"""Distinguishes errors that a failed peer caused from all other errors. They are consequences, and the peer's
own error takes precedence. Pure.

``is_peer_error`` classifies an error in the process that raised it, and the result is sent as
``ErrorKind.PEER``. torch has no exception class for a failed peer (gloo raises a plain RuntimeError), so the
text decides. Printed output is used only for a process that could not report its own error, for example an
executable.

Texts such as "Connection reset by peer" come from the operating system, and a script's own database uses
them, too. They count only in messages of torch.distributed, gloo or NCCL, and never in a world of one
process.
"""

import re

from evergrad_trainer.base.errors import PeerLostError

FAILURE_WORDS = "the connection to another process was lost"
"""Text that a worker of a typed run prints instead of a collective's error."""
_DECISIVE = re.compile(
    rf"{FAILURE_WORDS}|Connection closed by peer \[|connectFullMesh failed", re.IGNORECASE
)
"""Texts of this program and of gloo, which writes a bracket before a peer's address."""
_NETWORK = re.compile(
    r"closed by (?:remote )?peer|connection was likely closed|reset by peer|broken "
    r"pipe|connection refused|failed to connect"
    r"|timed out waiting|timed out after|socket timeout|operation timeout|remote process exit|remote ?error"
    r"|communicator was aborted|recvvalue\w* failed|sendbytes failed",
    re.IGNORECASE,
)
_TORCH = re.compile(
    r"gloo|nccl|ProcessGroup|c10d|torch\.distributed|Dist(?:Network|Backend|Store)Error|socket(?:Progress|\w*Connect)\b",
    re.IGNORECASE,
)
_PYTHONS = re.compile(r"\b(?:Connection\w*|BrokenPipe|Timeout|OS)Error\b")
"""Exception classes that no collective raises."""
_REMARK = re.compile(r"\[[IW]\d{4} ")
"""Prefix of torch's log lines at the levels info and warning, for example ``[W1122 …``."""
_NCCL_LINES = 5
"""NCCL prints the cause a few lines below its first line."""
_LONGEST_CHAIN = 16
"""Longest chain of causes to follow; a limit is needed because a chain may be circular."""


def is_peer_error(error: BaseException, *, world_size: int) -> bool:
    """Return whether ``error``, or an error in its chain of causes, means that a peer is gone.

    Only classes that a collective raises count: PeerLostError, and RuntimeError with its subclasses in torch.
    """
    seen: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if seen is None:
            return False
        if isinstance(seen, PeerLostError):
            return True
        text = f"{type(seen).__module__}.{type(seen).__name__}: {seen}"
        if isinstance(seen, RuntimeError) and is_peer_failure(text, world_size=world_size):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def is_peer_failure(text: str, *, world_size: int) -> bool:
    """Return whether ``text``, a message or the last output of a worker, reports a failed peer."""
    if world_size <= 1:
        return False
    lines = text.splitlines()
    for index, line in enumerate(lines):
        # Skip classes that no collective raises, and log lines: they do not show why the process ended.
        if _PYTHONS.search(line) or _REMARK.search(line):
            continue
        if _DECISIVE.search(line):
            return True
        # A text of the operating system counts only next to the name of a library that communicates with
        # peers.
        num_lines = _NCCL_LINES if "NCCL error in:" in line else 1
        said = "\n".join(lines[index : index + num_lines])
        if _TORCH.search(said) and _NETWORK.search(said):
            return True
    return False
