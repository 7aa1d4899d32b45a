"""Tells errors that the failure of a peer has caused from all others: they are consequences, and the peer's
own error counts more. Pure.

``is_peer_error`` judges an error in the process that raised it, and the error travels as ``ErrorKind.PEER``.
torch has no class for a failed peer (gloo raises a bare RuntimeError), so that the text decides. Only the end
of a process that could not report its own error, such as an executable's, is judged by what it printed.

Words like "Connection reset by peer" are the system's, and a script's own database uses them too. They
count only in messages of torch.distributed, gloo or NCCL, and never in a world of one process.
"""

import re

from evergrad_trainer.base.errors import PeerLostError

FAILURE_WORDS = "the connection to another process was lost"
"""Words that a typed run's worker prints instead of a collective's error."""
_DECISIVE = re.compile(
    rf"{FAILURE_WORDS}|Connection closed by peer \[|connectFullMesh failed", re.IGNORECASE
)
"""Ours, and gloo's: its peers' addresses begin with a bracket."""
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
"""Classes that no collective raises."""
_REMARK = re.compile(r"\[[IW]\d{4} ")
"""torch's log lines of no consequence: ``[W1122 …``."""
_NCCL_LINES = 5
"""NCCL prints the cause some lines below its first."""
_LONGEST_CHAIN = 16
"""Errors that were raised from each other: a bound, since a chain may be a circle."""


def is_peer_error(error: BaseException, *, world_size: int) -> bool:
    """Whether ``error``, or one that it was raised from, means that a peer is gone.

    Only classes that a collective raises count: our own, and RuntimeError with those of torch below it.
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
    """Whether ``text``, the last that a worker printed, is of a failed peer."""
    if world_size <= 1:
        return False
    lines = text.splitlines()
    for index, line in enumerate(lines):
        # Neither a class that no collective raises, nor a remark, says why the process ended.
        if _PYTHONS.search(line) or _REMARK.search(line):
            continue
        if _DECISIVE.search(line):
            return True
        # The system's words count only next to the name of a library that speaks with peers.
        num_lines = _NCCL_LINES if "NCCL error in:" in line else 1
        said = "\n".join(lines[index : index + num_lines])
        if _TORCH.search(said) and _NETWORK.search(said):
            return True
    return False
