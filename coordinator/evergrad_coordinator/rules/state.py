"""The values a group is made of: settings, connected nodes, the running world, a proposal, and effects."""

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
    """Bounds and times of one run. Times in seconds."""

    run: str
    min_nodes: int
    max_nodes: int
    expect: int
    """Nodes that are waited for at the start, for ``start_wait_seconds``."""
    token: str
    """Shown by every node that joins."""
    recovery: Recovery = "in-process"
    start_wait_seconds: float = 30.0
    debounce_seconds: float = 0.03
    silence_seconds: float = 3.0
    lease_seconds: float = 10.0
    ready_limit_seconds: float = 35.0
    soft_limit_seconds: float = float(SOFT_LIMIT_SECONDS)
    up_limit_seconds: float = 600.0
    """With all that a member does before it is up: it may restore a large state, or get it from
    another node."""
    save_patience_seconds: float = 60.0
    """Below ``soft_limit_seconds``: the step boundary comes after the save."""
    hold_joins: bool = False
    longest_hold_seconds: float = 600.0
    max_failures_without_progress: int = 3
    epoch: int = 0
    exit_when_empty: bool = False
    nothing_runs: bool = False
    """No group of the run is left from before, as the coordinator was told: nobody has to be waited for."""
    max_members: int = 4096


# ---- effects: what the edge does, in this order ------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """A message to one connection."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Close:
    """The connection ends once what was sent before has left."""

    peer: int
    why: str


@dataclass(frozen=True)
class Persist:
    """``generation`` is durable before any later effect happens."""

    expected: int
    generation: int


@dataclass(frozen=True)
class Log:
    """One line of the log."""

    event: str
    fields: dict[str, object]


@dataclass(frozen=True)
class Finish:
    """The run is over for everybody."""

    exit_code: int


Effect = Send | Close | Persist | Log | Finish


# ---- nodes and groups --------------------------------------------------------------------------------------

Key = tuple[str, str]
"""A node and its incarnation: the same pod index started anew is somebody else."""


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
    """Time of the newest beat of the process beside the node's own."""
    group: int = 0
    """Generation that this node's workers are in; 0 for none."""
    ready: Ready | None = None
    step: int | None = None
    """Newest finished step in this node's memory, -1 for none; None before it has reported one."""
    is_leaving: bool = False
    released_at: float | None = None
    is_done: bool = False
    early: dict[type[Message], Message] = field(default_factory=dict)
    """Newest report of each kind about its group from before that was known here."""

    @property
    def key(self) -> Key:
        """Node and incarnation."""
        return self.name, self.incarnation

    @property
    def is_candidate(self) -> bool:
        """Whether it may be a member of the next group."""
        return self.workers > 0 and not self.is_leaving and not self.is_done


@dataclass(frozen=True)
class RankPlacement:
    """A member's ranks: ``first_rank`` … ``first_rank + workers - 1``."""

    first_rank: int
    workers: int


@dataclass
class GroupWorld:
    """The newest group that was told to go (or was found running)."""

    generation: int
    places: dict[Key, RankPlacement]
    started_at: float
    up_at: float | None = None
    moved_at: float = float("-inf")
    """When a member last reported that its state grew, while the group was not up."""
    moved: dict[Key, int] = field(default_factory=dict)
    """Bytes of state that members have read or received so far."""
    up_step: int = -1
    is_broken: bool = False
    broken_by: str = ""
    """The words of the first report that names more than a consequence."""
    break_cause: ChangeCause = "peer_lost"
    """The cause that this report names."""
    is_over: bool = False
    """Nobody's workers are in it any more."""
    up: set[Key] = field(default_factory=set)
    out: set[Key] = field(default_factory=set)
    """Members whose workers are known to be gone from it."""
    done: set[Key] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    """Ranks whose workers have ended with 0."""
    lost: set[Key] = field(default_factory=set)
    """Members that went away unasked, before or after their workers were out, except those that had ended
    well."""
    has_left: bool = False
    """A member went away as it was asked to."""
    last_contact: dict[Key, float] = field(default_factory=dict)
    """Last contact of members that were lost, until they are back."""
    unwatched: set[Key] = field(default_factory=set)
    """Members that had no contact for so long that their workers may have ended by themselves."""

    @property
    def is_up(self) -> bool:
        """Whether all of its members have reported that they are up."""
        return self.up_at is not None

    @property
    def size(self) -> int:
        """Its number of ranks."""
        return sum(place.workers for place in self.places.values())


@dataclass
class Proposal:
    """A plan that was announced and has not gone yet."""

    generation: int
    members: tuple[Key, ...]
    hard: bool
    cause: ChangeCause
    reason: str
    made_at: float
    waits_for: set[Key]
    saves: bool = False
    """Members of the running group save together before they leave it, since nobody goes on with
    its state."""


@dataclass
class TrainingState:
    """Progress of the training itself, as nodes report it."""

    step: int = -1
    total_steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    checkpoint_step: int = -1
    updated_at: float | None = None
    failed_saves: int | None = None
    """Saves that have failed in a row; None where no save has ended yet."""
    save_trouble: str = ""
    save_message: str = ""
    """Why the last of them failed: one of causes.TROUBLES, and in words."""
    values: dict[str, float] = field(default_factory=dict)
    """Further numbers of the newest step that was reported."""
    evaluations: dict[str, EvaluationReport] = field(default_factory=dict)
    """The newest results of each evaluation set, of MOST_SETS at most."""


MOST_SETS = 16
"""Evaluation sets whose results are kept; further ones are left out."""


def node_order(name: str) -> tuple[int, int, str]:
    """Sorts pod indices as numbers, anything else after them."""
    # Not every digit of Unicode is one for ``int``.
    return (0, int(name), name) if name.isascii() and name.isdigit() else (1, 0, name)
