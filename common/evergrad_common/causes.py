"""One vocabulary of causes, as data: why a group changed, a save failed, a step made no update, a process
stopped or a pod ended, what time was lost to, and what a pod's time was used for.

A cause is decided where it arises and travels as a value; its text is here, for reports and pages. No code
reads a cause out of a sentence. The words of a coordinator, such as ``node 2 lost``, travel beside it, for
people.
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
"""Why a group broke, as a node sees it. ``peer_lost`` is a consequence; a failure only where nobody was lost.

``environment``: trouble of one host or one moment. ``numeric``: a value that is not finite, or replicas that
differ.
"""
Planned = Literal["node_joined", "node_left", "capacity_changed"]
"""Why a group changes at a step boundary, with all of its members."""
Lost = Literal["node_lost", "coordinator_lost"]
"""Loss of a node or of the coordinator that had not announced that it leaves."""
ChangeCause = BreakCause | Planned | Lost | Literal["volume_full", "other"]
"""Why a group gave way to another one. ``volume_full``: ``environment``, where the trouble is ``no_space``.
``other``: no cause was given, or one of another version."""
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
"""Why a process of a run stopped training, as its records say."""
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
"""The use that a second of a pod went to. Each has exactly one of them."""


class PodCause(StrEnum):
    """Why a pod ended: the words in the status of a run and in its Events."""

    DONE = "Done"
    """Exit code 0: the run is complete."""
    USER_ERROR = "UserError"
    """Exit code 64: wrong configuration or data.

    Final once it is confirmed and no group has formed, else free.
    """
    WORKER_CRASH = "WorkerCrash"
    """Any other exit code. Counts."""
    OUT_OF_MEMORY = "OutOfMemory"
    """Killed at its memory limit. Counts."""
    VOLUME_FULL = "VolumeFull"
    """Nothing more could be written. Counts."""
    OUT_OF_EPHEMERAL_STORAGE = "OutOfEphemeralStorage"
    """Evicted, since it wrote more on its host's disk than its limits allow. Counts."""
    START_ERROR = "StartError"
    """The container could not be started. Counts."""
    STOPPED = "Stopped"
    """Exit code 75 or 76, unasked by the operator. Free."""
    NODE_LOST = "NodeLost"
    """Its node is gone or silent. Free."""
    PREEMPTED = "Preempted"
    """It made room for a pod of higher priority. Free."""
    EVICTED = "Evicted"
    """By the eviction API, the kubelet or a shutdown of its node. Free."""
    REFUSED_BY_NODE = "RefusedByNode"
    """The kubelet did not take it. Free."""
    HOST_FAULT = "HostFault"
    """Trouble of its host or of the moment, such as a mount or a device. Free."""
    DELETED = "Deleted"
    """By somebody else. Free."""
    RELEASED = "Released"
    """By the operator: suspended, restarted, fewer nodes or the end. Not a restart."""
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
    """A cause's text in a report, and its word in the status of a run where a pod can end for it."""

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
"""Why a process stopped training, for a report on a run that went on afterwards."""
REQUESTED_ENDINGS: Final[frozenset[str]] = frozenset(
    {"signal", "stop_file", "stop_after_steps", "after_step", "observer", "complete"}
)
"""Endings that a person or the manifest asked for: the start after such a stop is not a restart."""

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
"""Uses that a run asked for; all others of a pod on a host are waste."""
OFF_HOST: Final[Use] = "queue"
"""The use of a pod that has no host yet, and holds no accelerator."""


def read_change(value: object) -> ChangeCause:
    """Reads a cause of CHANGES; anything else is ``other``, such as the sentence of an older file."""
    # Not an error: reports read the files of every version.
    return next((cause for cause in CHANGES if cause == value), "other")


def specify_break(cause: BreakCause, trouble: str) -> ChangeCause:
    """The cause of a change whose group broke: a full volume is no trouble of a host, since each host meets
    it. ``trouble``: one of TROUBLES, empty where none was given."""
    return "volume_full" if cause == "environment" and trouble == "no_space" else cause


def read_trouble(value: object) -> Trouble:
    """Reads one of TROUBLES; anything else is ``other``."""
    return next((trouble for trouble in TROUBLES if trouble == value), "other")


def describe_ending(value: str) -> str:
    """The text of an ending; a value that is none of ENDINGS, such as ``exit 70``, is its own text."""
    return next((text for ending, text in ENDINGS.items() if ending == value), value)
