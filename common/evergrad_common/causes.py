"""The causes that all packages use, as data: why a group changed, a save failed, a step made no update, a
process stopped or a pod ended, where time was lost, and how a pod's time was used.

The code that meets a cause chooses its value, and all other code passes the value on. The text of each cause
for reports and pages is here. No code parses a cause from a sentence. The coordinator's sentences, such as
``node 2 lost``, are sent in addition to the value, for people.

Four accounts of time use these causes. They have no common input, so their numbers differ on purpose:

====================  ====================  =======================  =======================================
account               counts                from                     a change of the group lasts
====================  ====================  =======================  =======================================
trainer, ``observers  seconds of rank 0,    steps, evaluations and   from the last step before it to the
.time_account``       by LOSSES             events, with their       first step after it, without evaluation
                                            Unix times               and saves
coordinator,          seconds of the        messages of nodes, with  from the event that stopped the group
``rules               group, by CHANGES     the coordinator's clock  (for a silent node: its last contact)
.interruptions``                                                     until all members are up
coordinator, ``rules  milliseconds of each  the state of the group   as above, but a silent node counts as
.ledger``             node, by USES         after each message       training until it is lost, because a
                                                                     counter does not decrease
page of a run's       seconds of rank 0,    ``events.jsonl``, as it  from the last step before it to the
files, ``run_files``  by CHANGES            grows                    event of the new group
====================  ====================  =======================  =======================================

The operator measures the lifetimes of pods, and divides the time of joined pods in proportion to the ledger.

- *Useful* is a step that was kept for the trainer, and one of USEFUL for nodes and pods.
- *Steps that are trained again*: the trainer counts the lost training as ``recompute``, the page of files
  counts it as part of the restart, the ledger counts the second training as ``repeated``, and the coordinator
  counts neither as lost.
- *A restart* is, in the report, each start of a process after the first. On the coordinator's page it is each
  change of the group, and on the page of files each change of the group and each start without a requested
  stop before it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

BreakCause = Literal[
    "worker_crash",
    "out_of_memory",
    "peer_lost",
    "user_error",
    "setup_failed",
    "stuck",
    "environment",
    "numeric",
]
"""Why a group broke, as a node reports it.

``peer_lost`` is a consequence of another cause; it counts as a failure only if no node was lost.
``environment``: a problem of one host or a temporary problem. ``numeric``: a value that is not finite, or
replicas that differ.
"""
Planned = Literal["node_joined", "node_left", "capacity_changed"]
"""Why a group changes at a step boundary, with all of its members."""
Lost = Literal["node_lost", "coordinator_lost"]
"""Loss of a node or of the coordinator without an announcement."""
ChangeCause = BreakCause | Planned | Lost | Literal["volume_full", "other"]
"""Why another group replaced a group. ``volume_full``: ``environment`` with the trouble ``no_space``.
``other``: no cause was given, or a cause of another version."""
Trouble = Literal[
    "no_space",
    "read_only",
    "permission",
    "io",
    "timeout",
    "fenced",
    "invalid",
    "peer_lost",
    "other",
]
"""Why a checkpoint could not be saved or read."""
Skip = Literal["loss", "grad", "overflow", "empty", "requested"]
"""Why a step makes no update: a loss or a gradient norm is not finite, a gradient has overflowed in fp16 at a
scale that can be lowered, no token carries a loss, or skipSteps names the step."""
Ending = Literal[
    "signal",
    "stop_file",
    "stop_after_steps",
    "after_step",
    "observer",
    "non_finite",
    "complete",
    "killed",
    "failed",
]
"""Why a process of a run stopped training, as the records of the run show."""
Use = Literal[
    "training",
    "evaluation",
    "saving",
    "startup",
    "repeated",
    "recovery",
    "waiting",
    "idle",
    "end",
    "queue",
]
"""What one second of a pod was used for. Each second has exactly one use."""


class PodCause(StrEnum):
    """Why a pod ended: the words in the status of a run and in its Events.

    "Counts" means that the end uses up ``failurePolicy.maxFailuresWithoutProgress``; "free" means that it
    does not.
    """

    DONE = "Done"
    """Exit code 0: the run is complete."""
    USER_ERROR = "UserError"
    """Exit code 64: wrong configuration or data.

    Ends the run if it is confirmed and no group has formed. Free otherwise.
    """
    WORKER_CRASH = "WorkerCrash"
    """Any other exit code. Counts."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Killed at its memory limit. Counts."""
    VOLUME_FULL = "VolumeFull"
    """No more data could be written. Counts."""
    OUT_OF_EPHEMERAL_STORAGE = "OutOfEphemeralStorage"
    """Evicted because it wrote more to its host's disk than its limits allow. Counts."""
    START_ERROR = "StartError"
    """The container could not be started. Counts."""
    STOPPED = "Stopped"
    """Exit code 75 or 76, not requested by the operator. Free."""
    NODE_LOST = "NodeLost"
    """Its node no longer exists or does not report. Free."""
    PREEMPTED = "Preempted"
    """Preempted by a pod of higher priority. Free."""
    EVICTED = "Evicted"
    """Evicted by the eviction API or the kubelet, or ended by a shutdown of its node. Free."""
    REFUSED_BY_NODE = "RefusedByNode"
    """Not admitted by the kubelet. Free."""
    HOST_FAULT = "HostFault"
    """A problem of its host or a temporary problem, such as a mount or a device. Free."""
    DELETED = "Deleted"
    """Deleted by another user or controller. Free."""
    RELEASED = "Released"
    """Deleted by the operator: the run was suspended, restarted, scaled down or has ended. Not a restart."""
    COORDINATOR_LOST = "CoordinatorLost"
    """The coordinator's pod ended or vanished. Free."""


COUNTED: Final = frozenset(
    {
        PodCause.WORKER_CRASH,
        PodCause.OUT_OF_MEMORY,
        PodCause.VOLUME_FULL,
        PodCause.OUT_OF_EPHEMERAL_STORAGE,
        PodCause.START_ERROR,
    }
)
"""Causes that use up ``failurePolicy.maxFailuresWithoutProgress``."""


@dataclass(frozen=True)
class Cause:
    """The text of a cause in a report, and its word in the status of a run if a pod can end for this
    cause."""

    text: str
    pod: PodCause | None = None


CHANGES: Final[Mapping[ChangeCause, Cause]] = {
    "node_lost": Cause("node lost", PodCause.NODE_LOST),
    "node_joined": Cause("node joined"),
    "node_left": Cause("node asked to leave"),
    "capacity_changed": Cause("number of processes changed"),
    "coordinator_lost": Cause("coordinator lost", PodCause.COORDINATOR_LOST),
    "worker_crash": Cause("process ended or was killed", PodCause.WORKER_CRASH),
    "out_of_memory": Cause("process killed for its memory", PodCause.OUT_OF_MEMORY),
    "stuck": Cause("process without a sign of life", PodCause.WORKER_CRASH),
    "setup_failed": Cause("group could not be set up", PodCause.WORKER_CRASH),
    "peer_lost": Cause("connection to a peer lost", PodCause.WORKER_CRASH),
    "environment": Cause("trouble of a host", PodCause.HOST_FAULT),
    "volume_full": Cause("volume full", PodCause.VOLUME_FULL),
    "numeric": Cause("value not finite, or replicas differ", PodCause.WORKER_CRASH),
    "user_error": Cause("error of the run itself", PodCause.USER_ERROR),
    "other": Cause("other"),
}
BREAKS: Final[tuple[BreakCause, ...]] = get_args(BreakCause)
PLANNED: Final[tuple[Planned, ...]] = get_args(Planned)
TROUBLES: Final[tuple[Trouble, ...]] = get_args(Trouble)
SKIPS: Final[tuple[Skip, ...]] = get_args(Skip)

ENDINGS: Final[Mapping[Ending, str]] = {
    "signal": "stopped by a signal",
    "stop_file": "stopped by the stop file",
    "stop_after_steps": "stopped after its number of steps",
    "after_step": "stopped after the requested step",
    "observer": "stopped at the request of an observer",
    "non_finite": "stopped before a step whose loss or gradient is not finite",
    "complete": "complete, then extended",
    "killed": "killed",
    "failed": "failed",
}
"""Why a process stopped training, for a report on a run that continued afterwards."""
REQUESTED_ENDINGS: Final[frozenset[str]] = frozenset(
    {"signal", "stop_file", "stop_after_steps", "after_step", "observer", "complete"}
)
"""Endings that a user or the manifest requested. On the page of a run's files, the start after such a stop is
not a restart."""

LOSSES: Final[Mapping[str, str]] = {
    "startup": "Start-up: from process start to first step",
    "restore": "Reading checkpoints",
    "recompute": "Steps that were lost in a kill and trained again",
    "checkpoint": "Paused for saves",
    "evaluation": "Evaluation",
    "reconfiguration": "Changes of the world: from the last step before to the first step after",
    "downtime": "No process existed",
    "other": "Between steps, and after the last",
}
"""Uses of a run's time that train nothing new."""

USES: Final[Mapping[Use, str]] = {
    "training": "Steps that were trained for the first time",
    "evaluation": "Evaluation, between steps or in a pod of its own",
    "saving": "Paused for saves",
    "startup": "Start of the pod, preparation of the data, first start of the group",
    "repeated": "Steps that were trained again",
    "recovery": "A change of the group, or a group that broke",
    "waiting": "On a host, waiting for other nodes",
    "idle": "In no group while other nodes train: a spare node, or a node that joins later",
    "end": "After the end of the run, or of the pod's part in it",
    "queue": "Without a host: in a queue, or not scheduled yet",
}
"""Uses of a pod's time, each with its text."""
USEFUL: Final[frozenset[Use]] = frozenset({"training", "evaluation", "saving"})
"""Uses that a run requested. All other uses of a pod on a host are waste."""
OFF_HOST: Final[Use] = "queue"
"""The use of a pod that has no host yet and holds no accelerator."""


def read_change(value: object) -> ChangeCause:
    """Return a cause of CHANGES, or ``other`` for any other value, for example a sentence from an older
    file."""
    # This is not an error, because reports read the files of every version.
    return next((cause for cause in CHANGES if cause == value), "other")


def specify_break(cause: BreakCause, trouble: str) -> ChangeCause:
    """Return the cause of a change whose group broke.

    A full volume is not a problem of one host, because all hosts share the volume. ``trouble``: one of
    TROUBLES; empty if none was reported.
    """
    return "volume_full" if cause == "environment" and trouble == "no_space" else cause


def read_trouble(value: object) -> Trouble:
    """Return one of TROUBLES, or ``other`` for any other value."""
    return next((trouble for trouble in TROUBLES if trouble == value), "other")


def describe_ending(value: str) -> str:
    """Return the text of an ending. A value that is not in ENDINGS, for example ``exit 70``, is its own
    text."""
    return next((text for ending, text in ENDINGS.items() if ending == value), value)
