"""Messages between a worker's helper and its node: lines of JSON over the socket next to the node
state file.

Both ends use the coordinator's codec: a field that one end does not know is ignored, so that the helper
and the node may have different versions.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from evergrad_common.codec import Codec

MAX_LINE_BYTES = 4096
"""Longest line in either direction, with its newline."""


@dataclass(frozen=True)
class ScriptReport:
    """The progress of training; not answered.

    Values may have any type here: the node reads each value by itself, so that one invalid value does not
    discard the others.
    """

    TYPE = "report"
    generation: Any = None
    rank: Any = None
    step: Any = None
    total_steps: Any = None
    loss: Any = None
    tokens_per_second: Any = None
    checkpoint_step: Any = None

    @property
    def values(self) -> dict[str, object]:
        """The values that are given, by name."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class CommitRequest:
    """May ``generation`` still write a checkpoint? Answered by ``CommitAnswer``."""

    TYPE = "commit"
    generation: int


@dataclass(frozen=True)
class CommitAnswer:
    """Whether the generation that asked may write."""

    TYPE = "answer"
    granted: bool


@dataclass(frozen=True)
class Guard:
    """This worker of ``generation`` stops in order when it is asked to; true while the connection lives."""

    TYPE = "guard"
    generation: int


@dataclass(frozen=True)
class Stopping:
    """This worker of ``generation`` has seen the request to stop."""

    TYPE = "stopping"
    generation: int


NodeMessage = ScriptReport | CommitRequest | CommitAnswer | Guard | Stopping
KINDS: tuple[type[NodeMessage], ...] = (
    ScriptReport,
    CommitRequest,
    CommitAnswer,
    Guard,
    Stopping,
)
CODEC: Codec[NodeMessage] = Codec(KINDS, max_bytes=MAX_LINE_BYTES)
