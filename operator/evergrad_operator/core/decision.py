"""The types of a decision about a run. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from evergrad_operator.core.objects.names import Phase
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.observe import VolumeRecord


class Action(StrEnum):
    """The actions that a decision can request for a run."""

    RUN = "Run"
    """Run the coordinator and the nodes."""
    HOLD = "Hold"
    """Change nothing, because there is an obstacle or the run is being deleted."""
    STOP = "Stop"
    """Delete the nodes first, then the coordinator."""
    FINISH = "Finish"
    """The run is over: create no pods, and let the remaining pods end."""
    CLEAN = "Clean"
    """The run's TTL has passed: delete its children, or the run with all its children. The volume stays."""


@dataclass(frozen=True)
class NodeBounds:
    """Minimum and maximum number of nodes, and number of allowed failures, for the coordinator's POST
    /bounds."""

    min: int
    max: int
    max_failures: int


@dataclass(frozen=True)
class PodDeletion:
    """One pod to delete. ``uid``: precondition. ``grace_seconds``: None uses the pod's own grace period."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class EvaluationPod:
    """The pod to create for the checkpoint of ``step``. ``host``: required host; empty for any host."""

    step: int
    attempt: int
    host: str = ""


@dataclass(frozen=True)
class Gang:
    """Nodes that a queue admits together.

    ``minimum``: nodes with this index or a higher index are elastic and admitted alone. ``number``, ``size``:
    the group that new pods of ``members`` join. Other nodes join no group.
    """

    minimum: int
    number: int = -1
    size: int = 0
    members: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Decision:
    """The actions to take for a run, and the reason.

    ``memory``: written to the status. ``gang``: None for a run without a queue. ``joins_group``: new nodes
    belong to the run's PodGroup. ``record``: the record to write to the PVC; None for no change.
    ``deletes_run``: also delete the TrainingRun. ``is_blocked``: the run cannot continue before a person
    follows ``message``.
    ``requeue_after``: seconds until the next pass; None if no pass is scheduled.
    """

    action: Action
    phase: Phase
    reason: str
    message: str
    memory: Memory
    nodes_to_create: tuple[tuple[int, int], ...] = ()
    gang: Gang | None = None
    joins_group: bool = False
    pods_to_delete: tuple[PodDeletion, ...] = ()
    coordinator_attempt: int | None = None
    preparation_attempt: int | None = None
    evaluation: EvaluationPod | None = None
    bounds: NodeBounds | None = None
    record: VolumeRecord | None = None
    deletes_run: bool = False
    is_blocked: bool = False
    requeue_after: float | None = None
