"""The values that a decision is made of. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from evergrad_operator.core.objects.names import Phase
from evergrad_operator.core.observe.memory import Memory
from evergrad_operator.core.observe.observe import VolumeRecord


class Action(StrEnum):
    """The kinds of a decision about a run as a whole."""

    RUN = "Run"
    """Have coordinator and nodes."""
    HOLD = "Hold"
    """Leave everything as it is: something is in the way, or the run is being deleted."""
    STOP = "Stop"
    """Have neither: nodes leave first, then the coordinator."""
    FINISH = "Finish"
    """The run is over: nothing is made, what is left ends."""
    CLEAN = "Clean"
    """The run has been over for long: its children go, or the run with all of them; the volume stays."""


@dataclass(frozen=True)
class NodeBounds:
    """Numbers of nodes that may train and of allowed failures, for POST /bounds of the coordinator."""

    min: int
    max: int
    max_failures: int


@dataclass(frozen=True)
class PodDeletion:
    """One pod to delete, if it is still that one. ``grace_seconds``: None leaves it to the pod."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclass(frozen=True)
class EvaluationPod:
    """The pod to make for the checkpoint of ``step``. ``host``: the only one that it may run on, empty for
    any."""

    step: int
    attempt: int
    host: str = ""


@dataclass(frozen=True)
class Gang:
    """Nodes that a queue admits together.

    ``minimum``: nodes from this index on are elastic, and admitted alone. ``number`` and ``size``: of the
    group that those of ``members`` join that are made now; other nodes join none.
    """

    minimum: int
    number: int = -1
    size: int = 0
    members: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Decision:
    """A decision: what to do with a run, and why. ``memory`` goes into the status; ``requeue_after`` in
    seconds.

    ``record``: what the PVC shall say of the run, None to leave it. ``gang``: None for a run without a queue.
    ``joins_group``: nodes that are made now are in the run's PodGroup. ``deletes_run``: the TrainingRun
    itself goes, too. ``is_blocked``: nothing goes on before a person has done what ``message`` says.
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
