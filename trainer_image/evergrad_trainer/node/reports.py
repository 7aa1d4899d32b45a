"""Reports of a node's workers to their supervisor, as values: messages of the protocol where it has the
word.

One way only: a supervisor calls its workers' keeper, and the keeper gives it one of these. Neither then needs
to know the other's methods, and a test reads a list.
"""

from dataclasses import dataclass

from evergrad_common.contract import ErrorKind, ExitCode
from evergrad_coordinator.protocol import (
    Broken,
    Capacity,
    Done,
    Finished,
    Restoring,
    Result,
    Up,
)
from evergrad_trainer.worker import channel


@dataclass(frozen=True)
class WorkersReady:
    """All warm workers are out of every group older than ``generation``; ``step``: the newest that one of
    them holds."""

    generation: int
    workers: int
    step: int


@dataclass(frozen=True)
class WorkersLeft:
    """All workers have left the run as they were told; ``is_saved``: what was to be saved is."""

    is_saved: bool


@dataclass(frozen=True)
class NoWorkers:
    """This node cannot have workers, or no longer; ``kind`` says whether another host could.

    ``exit_code``: of the node.
    """

    message: str
    kind: ErrorKind
    exit_code: ExitCode = ExitCode.INTERNAL
    trouble: str = ""


Report = (
    Capacity
    | WorkersReady
    | Up
    | Restoring
    | Broken
    | channel.WorkerResult
    | channel.Observed
    | Done
    | Finished
    | Result
    | WorkersLeft
    | NoWorkers
)
"""``channel.WorkerResult``: rank 0 reports that the run's end is recorded. ``Result``: all fresh workers have
ended because the run asked for it. ``Done``: they have ended well."""
