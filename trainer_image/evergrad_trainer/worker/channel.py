"""Records between a supervisor and one of its workers, over a socket pair that keeps their borders.

A word that the coordinator's protocol has means the same here: a ``plan`` is answered by ``ready``, ``go``
begins the group, ``up`` and ``broken`` report its fate, ``leave`` is answered by ``left``, ``result`` is the
run's end as rank 0 has written it down, and ``end`` is the order to end with it. The codec is the
coordinator's, too.
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
"""Above every generation a coordinator gives out: for a departure that no coordinator could plan."""


def fit_text(text: str) -> str:
    """``text`` as a record can carry it: not too long, and without the half characters of a file name that is
    not UTF-8."""
    return text.encode("utf-8", errors="replace").decode("utf-8")[:MAX_TEXT]


# ---- supervisor → worker -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPlan:
    """Leave the running group and say ready for ``generation``; ``hard``: at once, a member is gone.

    ``patience_seconds``: how long it may continue first so that a save in flight ends.
    ``saves``: no process continues with its state, so the group saves it before it is left.
    """

    generation: int
    hard: bool
    patience_seconds: float = 0.0
    saves: bool = False


@dataclass(frozen=True)
class WorkerGo:
    """All members are ready: meet them at ``address``:``port``, as ``rank`` of ``world_size``, within
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
    """The cause in the coordinator's words."""


@dataclass(frozen=True)
class WorkerLeave:
    """Leave the run; ``save``: no other worker holds the state, so save it first, alone.

    ``is_planned``: ``generation`` is a number the coordinator has given out for this; else it only is above
    all others.
    """

    generation: int
    save: bool
    is_planned: bool = True


@dataclass(frozen=True)
class WorkerFinish:
    """The run is over: end with ``exit_code``."""

    exit_code: int


@dataclass(frozen=True)
class WorkerPing:
    """Are you alive? Answered from the watchdog thread by ``pong``."""


# ---- worker → supervisor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorkerPong:
    """This process runs."""


@dataclass(frozen=True)
class Warm:
    """Everything is built; this worker can join a group."""


@dataclass(frozen=True)
class WorkerReady:
    """Out of every group older than ``generation``, holding the state after ``step`` (-1: no state)."""

    generation: int
    step: int


@dataclass(frozen=True)
class WorkerUp:
    """In the group of ``generation``, which continues after ``step``."""

    generation: int
    step: int


@dataclass(frozen=True)
class WorkerBroken:
    """The group of ``generation`` ended under this worker, which itself is well.

    ``kind``: of the error that ended it.
    """

    generation: int
    step: int
    text: LongText
    kind: ErrorKind = ErrorKind.PEER


@dataclass(frozen=True)
class WorkerLeft:
    """Answer to ``leave``: whether what was to be saved is."""

    is_saved: bool


@dataclass(frozen=True)
class WorkerResult:
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
    text: LongText
    is_final: bool
    is_agreed: bool
    """All ranks raised it together, so that one of them speaks for all."""
    kind: ErrorKind = ErrorKind.INTERNAL
    """Kind of the error, which decides what may cure it."""
    trouble: str = ""
    """One of causes.TROUBLES, for an error of a volume."""


@dataclass(frozen=True)
class Observed:
    """A record for the node's metrics, from rank 0: ``kind`` names an observer's method, ``record`` its
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
    """One end of the pair. ``send`` may be called from any thread; ``receive`` from one."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end

    def send(self, record: Record, *, wait: bool = True) -> bool:
        """Whether the other end took it. Without ``wait`` an end that does not read loses the record.

        Raises ProtocolError for a record that its types do not allow: an error of this program.
        """
        data = _CODEC.encode(record)
        try:
            self.socket.send(data, 0 if wait else socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def observe(self, kind: str, record: dict[str, Any]) -> None:
        """Pass a record on for the node's metrics; none is worth waiting for, or an error."""
        with contextlib.suppress(ProtocolError):
            self.send(Observed(kind, _without_odd_numbers(record)), wait=False)

    def receive(self, timeout_seconds: float | None = None) -> Record | None:
        """The next record, or None after ``timeout_seconds``. Raises EOFError when the other end is gone."""
        if not select.select([self.socket], [], [], timeout_seconds)[0]:
            return None
        # The other end may have closed between the two calls; without DONTWAIT this would wait for ever.
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
"""Key of an object that stands for a number JSON does not know: a loss may be one."""


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
    """Two connected ends."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(first), Channel(second)
