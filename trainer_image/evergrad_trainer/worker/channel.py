"""Records between a supervisor and one of its workers, over a socket pair that preserves record boundaries.

Records have the meaning of the coordinator's messages with the same names: ``plan`` is answered by ``ready``;
``go`` begins the group; ``up`` and ``broken`` report its outcome; ``leave`` is answered by ``left``;
``result`` is the run's end as recorded by rank 0; ``end`` orders the worker to end with that result. The
codec is the coordinator's, too.
"""

import contextlib
import math
import select
import socket
from dataclasses import dataclass, field
from typing import Any

from evergrad_common.codec import MAX_INTEGER, MAX_TEXT, Codec, LongText, ProtocolError
from evergrad_common.contract import ErrorKind

_LONGEST = 64 * 1024
LOCAL_GENERATION = MAX_INTEGER
"""Greater than every generation of a coordinator: for a departure that no coordinator could plan."""


def fit_text(text: str) -> str:
    """Return ``text`` as a record can contain it: shortened, and without the surrogates of a file name that
    is not UTF-8."""
    return text.encode("utf-8", errors="replace").decode("utf-8")[:MAX_TEXT]


# ---- supervisor → worker -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPlan:
    """Leave the running group, and send ``ready`` for ``generation``. ``hard``: leave immediately; a member
    is gone.

    ``patience_seconds``: how long the group may continue until a save in progress ends. ``saves``: no process
    continues with the group's state, so the group saves it before it leaves.
    """

    generation: int
    hard: bool
    patience_seconds: float = 0.0
    saves: bool = False


@dataclass(frozen=True)
class WorkerGo:
    """All members are ready: connect to them at ``address``:``port``, as ``rank`` of ``world_size``, within
    ``setup_seconds``."""

    generation: int
    rank: int
    world_size: int
    address: str
    port: int
    setup_seconds: float
    cause: str
    """Why the group changed: one of causes.CHANGES."""
    detail: str = ""
    """The coordinator's description of the cause."""


@dataclass(frozen=True)
class WorkerLeave:
    """Leave the run. ``save``: no other worker holds the state, so save it first, alone.

    ``is_planned``: the coordinator has assigned ``generation`` to this departure; otherwise it is only
    greater than all others.
    """

    generation: int
    save: bool
    is_planned: bool = True


@dataclass(frozen=True)
class WorkerFinish:
    """End with ``exit_code``, because the run is over."""

    exit_code: int


@dataclass(frozen=True)
class WorkerPing:
    """Request for a sign of life. The watchdog thread answers with ``pong``."""


# ---- worker → supervisor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPong:
    """This process responds."""


@dataclass(frozen=True)
class Warm:
    """The worker has built everything, and can join a group."""


@dataclass(frozen=True)
class WorkerReady:
    """The worker has left all groups older than ``generation``, and holds the state after ``step`` (-1:
    none)."""

    generation: int
    step: int


@dataclass(frozen=True)
class WorkerUp:
    """The worker is in the group of ``generation``, which continues after ``step``."""

    generation: int
    step: int


@dataclass(frozen=True)
class WorkerBroken:
    """The group of ``generation`` has broken, but this worker still works.

    ``kind``: kind of the error that broke the group.
    """

    generation: int
    step: int
    text: LongText
    kind: ErrorKind = ErrorKind.PEER


@dataclass(frozen=True)
class WorkerLeft:
    """Reply to ``leave``: whether the state was saved as ordered."""

    is_saved: bool


@dataclass(frozen=True)
class WorkerResult:
    """The run has ended, and the end is recorded. Only rank 0 sends this."""

    generation: int
    step: int
    exit_code: int
    reason: str


@dataclass(frozen=True)
class Failed:
    """This worker ends because of an error. ``is_final``: the input is wrong, so a retry would fail again."""

    generation: int
    step: int
    exit_code: int
    error: str
    text: LongText
    is_final: bool
    is_agreed: bool
    """Whether all ranks raised the error together, so that one report is enough."""
    kind: ErrorKind = ErrorKind.INTERNAL
    """Kind of the error, which decides how the run continues."""
    trouble: str = ""
    """One of causes.TROUBLES if a volume failed, and empty otherwise."""


@dataclass(frozen=True)
class Observed:
    """A record of rank 0 for the node's metrics. ``kind`` names an observer's method; ``record`` is its
    argument."""

    kind: str
    record: dict[str, Any] = field(default_factory=dict)


Record = (
    WorkerPlan
    | WorkerGo
    | WorkerLeave
    | WorkerFinish
    | WorkerPing
    | WorkerPong
    | Warm
    | WorkerReady
    | WorkerUp
    | WorkerBroken
    | WorkerLeft
    | WorkerResult
    | Failed
    | Observed
)
RECORDS: tuple[type[Record], ...] = (
    WorkerPlan, WorkerGo, WorkerLeave, WorkerFinish, WorkerPing,
    WorkerPong, Warm, WorkerReady, WorkerUp, WorkerBroken, WorkerLeft, WorkerResult, Failed, Observed,
)  # fmt: skip
_CODEC: Codec[Record] = Codec(RECORDS, max_bytes=_LONGEST)


class Channel:
    """One end of the pair. Any thread may call ``send``; only one thread may call ``receive``."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, record: Record, *, wait: bool = True) -> bool:
        """Send a record; return whether it was sent. Without ``wait``, the record is dropped if the buffer is
        full.

        Raises ProtocolError if the record contains a value of a wrong type, which is a programming error.
        """
        data = _CODEC.encode(record)
        try:
            self.socket.send(data, 0 if wait else socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def observe(self, kind: str, record: dict[str, Any]) -> None:
        """Send a record for the node's metrics. Drop it if it would have to wait or cannot be encoded."""
        with contextlib.suppress(ProtocolError):
            self.send(Observed(kind, _without_odd_numbers(record)), wait=False)

    def receive(self, timeout_seconds: float | None = None) -> Record | None:
        """Return the next record, or None after ``timeout_seconds``. Raises EOFError if the other end is
        closed."""
        if not select.select([self.socket], [], [], timeout_seconds)[0]:
            return None
        # The other end may close between the two calls; without DONTWAIT, this call would then wait forever.
        try:
            data = self.socket.recv(_LONGEST, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError("the other end of the channel is gone")
        record = _CODEC.decode(data)
        return (
            Observed(record.kind, _with_odd_numbers(record.record))
            if isinstance(record, Observed)
            else record
        )

    def close(self) -> None:
        self.socket.close()


_ODD = "$number"
"""Key of an object that represents a number that JSON lacks; a loss may be infinite or NaN."""


def _without_odd_numbers(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_ODD: str(value)}
    if isinstance(value, dict):
        return {key: _without_odd_numbers(one) for key, one in value.items()}
    return (
        [_without_odd_numbers(one) for one in value]
        if isinstance(value, list | tuple)
        else value
    )


def _with_odd_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return (
            float(value[_ODD])
            if value.keys() == {_ODD}
            else {key: _with_odd_numbers(one) for key, one in value.items()}
        )
    return [_with_odd_numbers(one) for one in value] if isinstance(value, list) else value


def channel_pair() -> tuple[Channel, Channel]:
    """Return two connected ends."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(first), Channel(second)
