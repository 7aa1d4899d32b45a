"""What a supervisor and one of its workers say to each other: small records over a socket pair that keeps their borders."""

import json
import select
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from evergrad_coordinator.contract import ErrorKind

_LONGEST = 64 * 1024
MAX_TEXT = 4096
"""Longest free text in a record: a failure's last words."""


# ---- supervisor → worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """Leave the running group and say ready for ``generation``; ``hard``: at once, a member is gone.

    ``patience_seconds``: how long it may go on first so that a save in flight ends.
    ``saves``: nobody goes on with its state, so the group saves it before it is left.
    """

    generation: int
    hard: bool
    patience_seconds: float = 0.0
    saves: bool = False


@dataclass(frozen=True)
class Begin:
    """All members are ready: meet them at ``address``:``port``, as ``rank`` of ``size``. ``setup_seconds`` bounds the meeting."""

    generation: int
    rank: int
    size: int
    address: str
    port: int
    setup_seconds: float
    cause: str
    """Why the group changed: the coordinator's reason."""


@dataclass(frozen=True)
class Depart:
    """Leave the run; ``save``: nobody else holds the state, so save it first, alone.

    ``is_planned``: ``generation`` is a number the coordinator has given out for this; else it only is above all others.
    """

    generation: int
    save: bool
    is_planned: bool = True


@dataclass(frozen=True)
class Finish:
    """The run is over: end with ``exit_code``."""

    exit_code: int


@dataclass(frozen=True)
class Ping:
    """Are you alive? Answered from the guard thread by ``pong``."""


# ---- worker → supervisor ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pong:
    """This process runs."""


@dataclass(frozen=True)
class Warm:
    """Everything is built; this worker can join a group."""


@dataclass(frozen=True)
class Ready:
    """Out of every group older than ``generation``, holding the state after ``step`` (-1: no state)."""

    generation: int
    step: int


@dataclass(frozen=True)
class Up:
    """In the group of ``generation``, which goes on after ``step``."""

    generation: int
    step: int


@dataclass(frozen=True)
class Broken:
    """The group of ``generation`` ended under this worker, which itself is well. ``kind``: of the error that ended it."""

    generation: int
    step: int
    text: str
    kind: str = ErrorKind.PEER.value


@dataclass(frozen=True)
class Saved:
    """Answer to ``depart``: whether what was to be saved is."""

    is_saved: bool


@dataclass(frozen=True)
class Ended:
    """The run has reached an end that is written down; from rank 0."""

    generation: int
    step: int
    exit_code: int
    reason: str


@dataclass(frozen=True)
class Failed:
    """This worker ends because of an error. ``is_final``: wrong input, which a retry cannot cure."""

    generation: int
    step: int
    exit_code: int
    error: str
    text: str
    is_final: bool
    is_agreed: bool
    """All ranks raised it together, so that one of them speaks for all."""
    kind: str = ErrorKind.INTERNAL.value
    """An ErrorKind: what may cure it."""


@dataclass(frozen=True)
class Observed:
    """A record for the node's metrics, from rank 0: ``kind`` names an observer's method, ``record`` its argument."""

    kind: str
    record: dict[str, Any] = field(default_factory=dict)


Record = (
    Change
    | Begin
    | Depart
    | Finish
    | Ping
    | Pong
    | Warm
    | Ready
    | Up
    | Broken
    | Saved
    | Ended
    | Failed
    | Observed
)
_KINDS: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Change,
        Begin,
        Depart,
        Finish,
        Ping,
        Pong,
        Warm,
        Ready,
        Up,
        Broken,
        Saved,
        Ended,
        Failed,
        Observed,
    )
}


class Channel:
    """One end of the pair. ``send`` may be called from any thread; ``receive`` from one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, record: Record, *, wait: bool = True) -> bool:
        """Whether the other end took it. Without ``wait`` an end that does not read loses the record."""
        data = json.dumps([type(record).__name__, asdict(record)]).encode()
        try:
            self.socket.send(data, 0 if wait else socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def observe(self, kind: str, record: dict[str, Any]) -> None:
        """Pass a record on for the node's metrics; none is worth waiting for."""
        self.send(Observed(kind, record), wait=False)

    def receive(self, timeout_seconds: float | None = None) -> Record | None:
        """The next record, or None after ``timeout_seconds``. Raises EOFError when the other end is gone."""
        if not select.select([self.socket], [], [], timeout_seconds)[0]:
            return None
        try:
            data = self.socket.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the other end of the channel is gone")
        name, fields = json.loads(data)
        return _KINDS[name](**fields)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.socket.close()


def channel_pair() -> tuple[Channel, Channel]:
    """Two connected ends."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(first), Channel(second)
