"""Whether an error says that another process of the group is gone: a consequence, whose own cause counts
more. Pure.

Words like "Connection reset by peer" are the system's, and a script's own database says them too. So they
count only in what torch.distributed, gloo or NCCL have said, and never in a world of one process.
"""

import re

LOST_WORDS = "the connection to another process was lost"
"""What a typed run's worker prints instead of a collective's error."""
_DECISIVE = re.compile(
    rf"{LOST_WORDS}|Connection closed by peer \[|connectFullMesh failed", re.IGNORECASE
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
"""NCCL tells the cause some lines below its first."""


def is_lost_peer(text: str, *, world_size: int) -> bool:
    """Whether ``text``, an error's or the last that a worker printed, is of a lost peer."""
    if world_size <= 1:
        return False
    lines = text.splitlines()
    return any(
        _tells_of_it(line, lines[index + 1 : index + _NCCL_LINES])
        for index, line in enumerate(lines)
    )


def _tells_of_it(line: str, following: list[str]) -> bool:
    if _PYTHONS.search(line) or _REMARK.search(line):
        return False
    if _DECISIVE.search(line):
        return True
    said = "\n".join([line, *following]) if "NCCL error in:" in line else line
    return bool(_TORCH.search(said) and _NETWORK.search(said))
