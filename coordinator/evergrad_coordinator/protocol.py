"""The messages between a run's coordinator and its nodes: one JSON object a line over TCP, each a frozen
dataclass here.

A node connects and sends ``hello``; the coordinator answers with ``welcome`` or ``refused``. Every change of
the group has two phases: ``plan`` to all nodes → ``ready`` from all members → ``go``. Generation numbers only
grow, and a message that names an older generation is ignored. For example, a ``ready`` for generation 6 is
ignored if generation 7 has been planned meanwhile.
"""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from evergrad_common.causes import BreakCause
from evergrad_common.codec import MAX_INTEGER, Codec, FieldBounds, LongText

PROTOCOL_VERSION = 1
MAX_GENERATION = 2**52
"""Bound that generations stay below. A node that claims more is refused, so that higher numbers stay free."""
MAX_WORKERS = 4096

Generation = Annotated[int, FieldBounds(0, MAX_GENERATION)]
Workers = Annotated[int, FieldBounds(0, MAX_WORKERS)]
Step = Annotated[int, FieldBounds(-1, MAX_GENERATION)]
"""A finished step; -1 if no step has been finished."""

Recovery = Literal["in-process", "fresh"]
"""in-process: workers survive a change of the group. fresh: each generation has its own workers."""


@dataclass(frozen=True)
class Message:
    """Base of all messages. ``TYPE`` is the value of ``type`` on the wire."""

    TYPE: ClassVar[str]


# ---- node → coordinator ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Placement(Message):
    """The ranks of a node in a running generation: ``first_rank`` … ``first_rank + workers - 1``."""

    TYPE = "had"
    generation: int
    first_rank: int
    workers: int
    world_size: int


@dataclass(frozen=True)
class Hello(Message):
    """First message of a connection, also after a reconnect.

    ``workers`` is the current number of warm workers; a node with 0 cannot be a member yet. ``incarnation``
    is unique to a process; the newest incarnation of a node wins. ``fingerprint`` must be equal in all
    members of a group: torch, configuration, image.
    """

    TYPE = "hello"
    run: str
    node: str
    incarnation: str
    address: str
    workers: int
    recovery: Recovery
    fingerprint: dict[str, str] = field(default_factory=dict)
    token: str = ""
    had: Placement | None = None
    known_generation: int = 0
    """Newest generation that any coordinator has sent to this node."""
    protocol: int = PROTOCOL_VERSION


@dataclass(frozen=True)
class Ping(Message):
    """Sent twice a second; answered by ``pong``."""

    TYPE = "ping"


@dataclass(frozen=True)
class Beat(Message):
    """First message of a node's second connection, in place of ``hello``. Only pings follow.

    A helper process of the node opens this connection. While pings arrive, the node may be slow but is not
    lost. The coordinator ignores beats of an incarnation that is not connected.
    """

    TYPE = "beat"
    run: str
    node: str
    incarnation: str
    token: str = ""


@dataclass(frozen=True)
class Capacity(Message):
    """The number of this node's warm workers has changed."""

    TYPE = "capacity"
    workers: Workers


@dataclass(frozen=True)
class Ready(Message):
    """This node's workers have left every group older than ``generation``.

    ``workers`` is the number of workers that can take part in ``generation``. ``port`` is the port of a new
    store at the node's address. ``step`` is the newest finished step in memory, or -1.
    """

    TYPE = "ready"
    generation: Generation
    workers: Workers
    port: Annotated[int, FieldBounds(0, 65535)]
    step: Step = -1


@dataclass(frozen=True)
class Up(Message):
    """The group of ``generation`` exists and continues after ``step``."""

    TYPE = "up"
    generation: Generation
    step: Step


@dataclass(frozen=True)
class Broken(Message):
    """``generation`` cannot continue. ``exit_code`` is the worker's exit code (negative: its signal), or None
    if no worker has ended.

    ``is_final``: no retry can fix it (exit 64), so the run ends. The generation broke ``time_since`` seconds
    ago. A duration needs no common clock of two nodes.
    """

    TYPE = "broken"
    generation: Generation
    cause: BreakCause
    rank: Annotated[int, FieldBounds(-1, MAX_GENERATION)] = -1
    step: Step = -1
    exit_code: int | None = None
    message: LongText = ""
    is_final: bool = False
    time_since: Annotated[float, FieldBounds(0, MAX_GENERATION)] = 0.0
    trouble: str = ""
    """One of causes.TROUBLES, if the worker met one; a newer node may have more of them."""


@dataclass(frozen=True)
class Leaving(Message):
    """This node was asked to leave (SIGTERM).

    It stays a member until the next group without it starts, or until it disconnects.
    """

    TYPE = "leaving"
    reason: str = "preemption"


@dataclass(frozen=True)
class Left(Message):
    """Last message of a node that leaves on request. ``is_saved``: it was asked to save, and has saved."""

    TYPE = "left"
    generation: Generation
    is_saved: bool


@dataclass(frozen=True)
class Boundary(Message):
    """A checkpoint of ``step`` is complete: joins that were delayed may happen now."""

    TYPE = "boundary"
    generation: Generation
    step: Step


@dataclass(frozen=True)
class Done(Message):
    """All of this node's workers have ended with exit code 0 (fresh workers only)."""

    TYPE = "done"
    generation: Generation


@dataclass(frozen=True)
class Finished(Message):
    """The worker of ``rank`` has ended with exit code 0 (fresh workers only).

    An older coordinator ignores this message.
    """

    TYPE = "finished"
    generation: Generation
    rank: Annotated[int, FieldBounds(0, MAX_GENERATION)]


@dataclass(frozen=True)
class Result(Message):
    """The end of the run is committed: training is complete (``exit_code`` 0) or was stopped (75, 76)."""

    TYPE = "result"
    generation: Generation
    step: Step
    exit_code: int = 0
    reason: str = "complete"


@dataclass(frozen=True)
class EvaluationReport(Message):
    """The newest results of one evaluation set: ``loss`` and the other values of its evaluator."""

    TYPE = "evaluation"
    step: Step
    values: dict[str, float]


@dataclass(frozen=True)
class Progress(Message):
    """Progress of the training, sent by rank 0's node at most twice a second. Unknown values are None."""

    TYPE = "progress"
    generation: Generation
    step: Step
    total_steps: Annotated[int, FieldBounds(0, MAX_GENERATION)] | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    checkpoint_step: Step | None = None
    values: dict[str, float] = field(default_factory=dict)
    """Further numbers of the step, by the names of their columns: rates, norms, the recipe's metrics."""
    evaluations: dict[str, EvaluationReport] = field(default_factory=dict)
    """The newest results of each evaluation set that this node has seen."""
    evaluation_seconds: Annotated[float, FieldBounds(0, MAX_GENERATION)] | None = None
    """Seconds for which evaluations have paused training since this node's process began."""
    saving_seconds: Annotated[float, FieldBounds(0, MAX_GENERATION)] | None = None
    """Seconds for which saves have paused training since this node's process began."""
    failed_saves: Annotated[int, FieldBounds(0, MAX_INTEGER)] | None = None
    """Number of saves that have failed in a row; 0 after a successful save."""
    save_trouble: str = ""
    """One of causes.TROUBLES: why the last save failed; a newer node may have more of them."""
    save_message: LongText = ""
    """Error text of the last failed save."""


@dataclass(frozen=True)
class Restoring(Message):
    """Bytes of state that this node's workers have read or received in a group that is not up yet.

    A node sends it only if the coordinator's welcome has ``takes_restoring``, a few times a second while the
    number grows. The time limit of a start counts from the newest message.
    """

    TYPE = "restoring"
    generation: Generation
    num_bytes: Annotated[int, FieldBounds(0, MAX_INTEGER)]


@dataclass(frozen=True)
class Commit(Message):
    """Asks whether ``generation`` may still write. Answered by ``permit`` with the same ``request``."""

    TYPE = "commit"
    request: int
    generation: Generation


# ---- coordinator → node ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Welcome(Message):
    """The hello was accepted. Workers must stop after ``lease_seconds`` without contact."""

    TYPE = "welcome"
    generation: int
    lease_seconds: float
    silence_seconds: float
    takes_restoring: bool = False
    """Whether the coordinator accepts :class:`Restoring`; an older coordinator closes the connection."""


@dataclass(frozen=True)
class Refused(Message):
    """The hello was not accepted; the connection closes. The node ends with ``exit_code``."""

    TYPE = "refused"
    reason: str
    message: LongText
    exit_code: int


@dataclass(frozen=True)
class Plan(Message):
    """Leave the running group and answer ``ready`` for ``generation``. ``hard``: leave
    immediately, because a member is gone; otherwise leave at a step boundary.

    ``is_member`` is False for nodes that will not be in the new group: spares and leaving nodes.
    ``is_only_holder``: no other node has reported a state, so the node must wait for a worker that does not
    answer and must not replace it. ``patience_seconds`` is how long the group may continue so that a save in
    progress can end; it is above 0 only if nodes join and none leaves.
    """

    TYPE = "plan"
    generation: int
    hard: bool
    is_member: bool
    reason: str
    is_only_holder: bool = False
    patience_seconds: float = 0.0
    saves: bool = False
    """Whether all ranks save together, each its share, before they leave the group.

    This is set if too few members remain.
    """
    cause: str = "other"
    """One of causes.CHANGES, with ``reason`` as its text; a newer coordinator may have more of them."""


@dataclass(frozen=True)
class Go(Message):
    """All members are ready, and the group starts.

    This node's workers are the ranks ``first_rank`` … ``first_rank + workers - 1`` of ``world_size``. The
    store is at address:port.
    """

    TYPE = "go"
    generation: int
    first_rank: int
    workers: int
    world_size: int
    node_rank: int
    num_nodes: int
    address: str
    port: int


@dataclass(frozen=True)
class Leave(Message):
    """A leaving node may go.

    ``save``: the node holds the newest state and no other node continues, so it first saves alone.
    """

    TYPE = "leave"
    generation: int
    save: bool


@dataclass(frozen=True)
class End(Message):
    """The run is over for this node: end with ``exit_code``."""

    TYPE = "end"
    exit_code: int
    reason: str
    message: LongText = ""


@dataclass(frozen=True)
class Pong(Message):
    """Answer to ``ping``; ``generation`` is the newest."""

    TYPE = "pong"
    generation: int


@dataclass(frozen=True)
class Permit(Message):
    """Answer to ``commit``."""

    TYPE = "permit"
    request: int
    granted: bool


@dataclass(frozen=True)
class Finishing(Message):
    """A worker of ``generation`` has ended with exit code 0, so the others are expected to end, too.

    If a worker then makes no progress, its node ends it. An older node ignores this message.
    """

    TYPE = "finishing"
    generation: int


# These lists define which side may send a message. Each side refuses the messages that it sends itself.
FROM_NODES: tuple[type[Message], ...] = (
    Hello, Beat, Ping, Capacity, Ready, Up, Broken, Leaving, Left, Boundary, Done, Result, Progress,
    Restoring, Commit, Finished,
)  # fmt: skip
FROM_COORDINATOR: tuple[type[Message], ...] = (
    Welcome,
    Refused,
    Plan,
    Go,
    Leave,
    End,
    Pong,
    Permit,
    Finishing,
)

_from_nodes, _from_coordinator = Codec(FROM_NODES), Codec(FROM_COORDINATOR)


def decode_from_node(line: bytes) -> Message:
    """Return the message of a line that a node has sent. For example, ``{"type": "ping"}`` is ``Ping()``.

    Raises ProtocolError, naming the field, if the line is not a valid message.
    """
    return _from_nodes.decode(line)


def decode_from_coordinator(line: bytes) -> Message:
    """Return the message of a line that the coordinator has sent.

    Raises ProtocolError, naming the field, if the line is not a valid message.
    """
    return _from_coordinator.decode(line)
