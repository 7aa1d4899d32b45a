"""Reports of a node's workers to their supervisor, as values. Messages of the protocol are used where they
fit.

The supervisor calls its worker group, and the worker group returns these values. The worker group therefore
needs no method of the supervisor, and a test can read the reports from a list.
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
    """All warm workers have left every group older than ``generation``. ``step``: the newest step of any."""

    generation: int
    workers: int
    step: int


@dataclass(frozen=True)
class WorkersLeft:
    """All workers have left the run as planned. ``is_saved``: the state was saved, or no save was
    requested."""

    is_saved: bool


@dataclass(frozen=True)
class NoWorkers:
    """This node can start no workers, or no more. ``kind`` shows whether another host could.

    ``exit_code``: exit code of the node.
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
ended because the run requested it. ``Done``: all fresh workers have ended successfully."""
