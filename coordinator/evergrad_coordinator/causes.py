"""One vocabulary of causes, as data: why a group changed, why a save failed, what time was lost to, why a pod
ended.

A cause is decided where it arises and travels as a value; its text stands here, for reports and pages. No
code reads a cause out of a sentence. The words of a coordinator, such as ``node 2 lost``, travel beside it,
for people.
"""

from collections.abc import Mapping
from dataclasses import dataclass
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
"""Who is gone without a word."""
ChangeCause = BreakCause | Planned | Lost | Literal["other"]
"""Why a group gave way to another one. ``other``: nobody has said so, or in words of another version."""
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


@dataclass(frozen=True)
class Cause:
    """What a report says of a cause.

    ``pod``: the operator's word for it in the status of a run; empty where it has none.
    """

    text: str
    pod: str = ""


CHANGES: Final[Mapping[ChangeCause, Cause]] = {
    "node_lost": Cause("node lost", "NodeLost"),
    "node_joined": Cause("node joined"),
    "node_left": Cause("node asked to leave"),
    "capacity_changed": Cause("number of processes changed"),
    "coordinator_lost": Cause("coordinator lost", "CoordinatorLost"),
    "worker_crash": Cause("process ended or was killed", "WorkerCrash"),
    "out_of_memory": Cause("process killed for its memory", "OutOfMemory"),
    "stuck": Cause("process without a sign of life", "WorkerCrash"),
    "setup_failed": Cause("group could not be set up", "WorkerCrash"),
    "peer_lost": Cause("connection to a peer lost", "WorkerCrash"),
    "environment": Cause("trouble of a host", "HostFault"),
    "numeric": Cause("value not finite, or replicas differ", "WorkerCrash"),
    "user_error": Cause("error of the run itself", "UserError"),
    "other": Cause("other"),
}
BREAKS: Final[tuple[BreakCause, ...]] = get_args(BreakCause)
PLANNED: Final[tuple[Planned, ...]] = get_args(Planned)
TROUBLES: Final[tuple[Trouble, ...]] = get_args(Trouble)

LOSSES: Final[Mapping[str, str]] = {
    "startup": "Start-up: process start to first step",
    "restore": "Reading checkpoints",
    "recompute": "Steps lost in a kill and trained again",
    "checkpoint": "Standing still for saves",
    "evaluation": "Evaluation",
    "reconfiguration": "Changes of the world: last step before to first step after",
    "downtime": "No process was there",
    "other": "Between steps, and after the last",
}
"""What the time of a run is lost to."""


def read_change(value: object) -> ChangeCause:
    """``value`` where it is a cause of CHANGES, else ``other``: a file of an older version has a sentence in
    its place."""
    return next((cause for cause in CHANGES if cause == value), "other")


def read_trouble(value: object) -> Trouble:
    """``value`` where it is one of TROUBLES, else ``other``."""
    return next((trouble for trouble in TROUBLES if trouble == value), "other")
