"""The values of a group's state: settings, connected nodes, the running group, a pending plan and effects."""

from dataclasses import dataclass, field

from evergrad_common.causes import ChangeCause
from evergrad_common.contract import SOFT_LIMIT_SECONDS
from evergrad_coordinator.protocol import (
    EvaluationReport,
    Message,
    Placement,
    Ready,
    Recovery,
)


@dataclass(frozen=True)
class GroupSettings:
    """Bounds and times of one run. Times are in seconds."""

    run: str
    min_nodes: int
    max_nodes: int
    expect: int
    """Number of nodes that the start waits for, at most ``start_wait_seconds``."""
    token: str
    """Token that every joining node must present."""
    recovery: Recovery = "in-process"
    start_wait_seconds: float = 30.0
    debounce_seconds: float = 0.03
    silence_seconds: float = 3.0
    lease_seconds: float = 10.0
    ready_limit_seconds: float = 35.0
    soft_limit_seconds: float = float(SOFT_LIMIT_SECONDS)
    up_limit_seconds: float = 600.0
    """Time limit of a start.

    It includes everything that a member does before it is up, such as reading a large state or receiving it
    from another node.
    """
    save_patience_seconds: float = 60.0
    """Maximum time for which a join waits for a running save.

    It must be below ``soft_limit_seconds``, because the step boundary comes after the save.
    """
    hold_joins: bool = False
    longest_hold_seconds: float = 600.0
    max_failures_without_progress: int = 3
    epoch: int = 0
    exit_when_empty: bool = False
    nothing_runs: bool = False
    """Whether no earlier group of the run can be running, so that the coordinator need not wait for one."""
    max_members: int = 4096


# ---- effects: the edge carries them out in their order -----------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Sends a message to one connection."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Close:
    """Closes a connection after all earlier messages have been written to it."""

    peer: int
    why: str


@dataclass(frozen=True)
class Persist:
    """Makes ``generation`` durable before any later effect is carried out."""

    expected: int
    generation: int


@dataclass(frozen=True)
class Log:
    """Writes one line of the log."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True)
class Finish:
    """Ends the run for all nodes with ``exit_code``."""

    exit_code: int


Effect = Send | Close | Persist | Log | Finish


# ---- nodes and groups --------------------------------------------------------------------------------------

Key = tuple[str, str]
"""Node name and incarnation. If the pod of an index is started again, it is a different key."""


@dataclass
class Node:
    """One connected node."""

    peer: int
    name: str
    incarnation: str
    address: str
    workers: int
    seen: float
    fingerprint: dict[str, str] = field(default_factory=dict)
    had: Placement | None = None
    beat_at: float = float("-inf")
    """Time of the newest beat of the node's helper process."""
    group: int = 0
    """Generation that this node's workers are in; 0 for none."""
    ready: Ready | None = None
    step: int | None = None
    """Newest finished step in this node's memory; -1 if there is none, None if the node has not reported."""
    is_leaving: bool = False
    released_at: float | None = None
    is_done: bool = False
    early: dict[type[Message], Message] = field(default_factory=dict)
    """Newest report of each kind that arrived before the node's group was adopted."""

    @property
    def key(self) -> Key:
        """Node and incarnation."""
        return self.name, self.incarnation

    @property
    def is_candidate(self) -> bool:
        """Whether the node may be a member of the next group."""
        return self.workers > 0 and not self.is_leaving and not self.is_done


@dataclass(frozen=True)
class RankPlacement:
    """A member's ranks: ``first_rank`` … ``first_rank + workers - 1``."""

    first_rank: int
    workers: int


@dataclass
class GroupWorld:
    """The newest group that was started with ``go`` or was adopted."""

    generation: int
    places: dict[Key, RankPlacement]
    started_at: float
    up_at: float | None = None
    moved_at: float = float("-inf")
    """Time at which a member last reported that its state grew before the group was up."""
    moved: dict[Key, int] = field(default_factory=dict)
    """Bytes of state that each member has read or received so far."""
    up_step: int = -1
    is_broken: bool = False
    broken_by: str = ""
    """Text of the first report that names a cause and not only a consequence."""
    break_cause: ChangeCause = "peer_lost"
    """Cause of this report."""
    is_over: bool = False
    """Whether no worker is in the group any more."""
    up: set[Key] = field(default_factory=set)
    out: set[Key] = field(default_factory=set)
    """Members whose workers are known to have left the group."""
    done: set[Key] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    """Ranks whose workers have ended with 0."""
    lost: set[Key] = field(default_factory=set)
    """Members that disconnected without a request to leave.

    It does not matter whether their workers had left the group before. Members that had finished with exit
    code 0 are not included.
    """
    has_left: bool = False
    """Whether a member has left on request."""
    last_contact: dict[Key, float] = field(default_factory=dict)
    """Time of the last contact of each lost member, until it reconnects."""
    unwatched: set[Key] = field(default_factory=set)
    """Members that were out of contact for so long that their workers may have stopped by themselves."""

    @property
    def is_up(self) -> bool:
        """Whether all members have reported that they are up."""
        return self.up_at is not None

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return sum(place.workers for place in self.places.values())


@dataclass
class Proposal:
    """A plan that was announced and has not started yet."""

    generation: int
    members: tuple[Key, ...]
    hard: bool
    cause: ChangeCause
    reason: str
    made_at: float
    waits_for: set[Key]
    saves: bool = False
    """Whether the members of the running group save together before they leave it.

    This is needed if no group continues with their state.
    """


@dataclass
class TrainingState:
    """Progress of the training, as reported by the nodes."""

    step: int = -1
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    checkpoint_step: int = -1
    updated_at: float | None = None
    failed_saves: int | None = None
    """Number of consecutive failed saves; None if no save has ended yet."""
    save_trouble: str = ""
    """Why the last save failed: one of causes.TROUBLES."""
    save_message: str = ""
    """Error text of the last failed save."""
    values: dict[str, float] = field(default_factory=dict)
    """Further numbers of the newest reported step."""
    evaluations: dict[str, EvaluationReport] = field(default_factory=dict)
    """The newest results of each evaluation set, for at most MOST_SETS sets."""


MOST_SETS = 16
"""Maximum number of evaluation sets whose results are kept. Results of further sets are ignored."""


def node_order(name: str) -> tuple[int, int, str]:
    """Return the sort key of a node name: pod indices as numbers, other names after them.

    For example, the names 2, 10 and a are sorted in this order.
    """
    # Check for ASCII, because ``int`` does not accept every Unicode digit.
    return (0, int(name), name) if name.isascii() and name.isdigit() else (1, 0, name)
