"""What broke a generation, and how often that may happen without progress. Pure."""

from dataclasses import dataclass, field

from evergrad_coordinator.contract import UNDISTURBED_SECONDS
from evergrad_coordinator.protocol import Broken, Recovery
from evergrad_coordinator.state import Training


@dataclass(frozen=True)
class Failure:
    """One report of a broken generation. ``at``: when it happened, by the coordinator's clock."""

    node: str
    at: float
    report: Broken

    @property
    def is_consequence(self) -> bool:
        """Whether it only saw others fail."""
        return self.report.cause == "peer_lost"


def find_root_cause(failures: list[Failure]) -> Failure | None:
    """The earliest that is no mere consequence; else the earliest."""
    return min(failures, key=lambda one: (one.is_consequence, one.at), default=None)


@dataclass
class FailureBudget:
    """Failures in a row without progress. A broken generation counts once, however many nodes report it."""

    limit: int
    recovery: Recovery
    used: int = 0
    last: Failure | None = None
    step: int = -1
    """Progress is a step above this one …"""
    checkpoint_step: int = -1
    """… or, with fresh workers, a checkpoint above this one."""
    _reports: list[Failure] = field(default_factory=list)
    _counted: int = -1
    _counted_at: float = float("-inf")

    def report(self, failure: Failure, training: Training) -> None:
        """Note one report; the first of a generation that is no consequence is counted."""
        generation = failure.report.generation
        if any(one.report.generation != generation for one in self._reports):
            self._reports.clear()
        if len(self._reports) < 64:
            self._reports.append(failure)
        self.last = find_root_cause(self._reports)
        if failure.is_consequence or self._counted == generation:
            return
        is_told = max(training.step, training.checkpoint_step, failure.report.step) >= 0
        if not is_told and failure.at - self._counted_at >= UNDISTURBED_SECONDS:
            self.used = 0
        self._counted, self._counted_at = generation, failure.at
        self.used += 1
        self.step = max(self.step, training.step, failure.report.step)
        self.checkpoint_step = max(self.checkpoint_step, training.checkpoint_step)

    def observe(self, training: Training) -> None:
        """Start to count anew after progress."""
        if self.used == 0:
            return
        if self.recovery == "fresh":
            has_progress = training.checkpoint_step > self.checkpoint_step
        else:
            has_progress = training.step > self.step
        if has_progress:
            self.used = 0

    @property
    def is_exhausted(self) -> bool:
        """Whether the run must end."""
        return self.used > self.limit

    def describe(self) -> str:
        """Count and root cause, for the run's message."""
        if self.last is None:
            return ""
        report = self.last.report
        code = "no exit code" if report.exit_code is None else f"exit code {report.exit_code}"
        times = "once" if self.used == 1 else f"{self.used} times"
        return (
            f"workers failed {times} without progress; {self.limit} such failures are allowed. "
            f"Last: {report.cause} on rank {report.rank} (node {self.last.node}) after step {report.step}, {code}"
            f"{': ' + report.message if report.message else ''}. See that rank's log in logs/."
        )
