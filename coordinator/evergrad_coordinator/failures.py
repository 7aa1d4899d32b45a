"""What broke a generation, and how often that may happen without progress. Pure."""

from dataclasses import dataclass, field

from evergrad_coordinator.contract import UNDISTURBED_SECONDS
from evergrad_coordinator.protocol import Broken, Recovery
from evergrad_coordinator.state import Training

MAX_FAILURES = 2**31
"""Nobody allows more."""


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
    """Failures in a row without progress. A broken generation counts once, however many nodes report it.

    One that broke only by the loss of peers is what a lost node leaves behind, and free. If nobody was lost, the first is free
    too (a node may have been away for a moment), and the next counts: peers that cannot reach each other break every group.
    """

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
    _unexplained: tuple[int, float] | None = None
    """Where training was, and when, as the last whole group broke that nobody gave a cause for."""

    def report(self, failure: Failure, training: Training) -> None:
        """Note one report; the first of a generation that is no consequence is counted."""
        generation = failure.report.generation
        if any(one.report.generation != generation for one in self._reports):
            self._reports.clear()
        if len(self._reports) < 64:
            self._reports.append(failure)
        self.last = find_root_cause(self._reports)
        if not failure.is_consequence and self._counted != generation:
            self._count(failure, training)

    def conclude(self, generation: int, training: Training, *, is_whole: bool) -> None:
        """All members are out of ``generation``, and the next is about to begin. ``is_whole``: not one was lost or left."""
        reports = [one for one in self._reports if one.report.generation == generation]
        if not is_whole:
            self._unexplained = None
        if not is_whole or not reports or self._counted == generation:
            return
        first, before = min(reports, key=lambda one: one.at), self._unexplained
        step = max(training.step, *(one.report.step for one in reports))
        reached = training.checkpoint_step if self.recovery == "fresh" else step
        self._unexplained = (reached, first.at)
        if before is None or reached > before[0]:
            return
        is_told = max(step, training.checkpoint_step) >= 0
        if is_told or first.at - before[1] < UNDISTURBED_SECONDS:
            self._count(first, training)

    def _count(self, failure: Failure, training: Training) -> None:
        is_told = max(training.step, training.checkpoint_step, failure.report.step) >= 0
        if not is_told and failure.at - self._counted_at >= UNDISTURBED_SECONDS:
            self.used = 0
        self._counted, self._counted_at = failure.report.generation, failure.at
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
        if self.last.is_consequence:
            return self._describe_unexplained(self.last)
        code = "no exit code" if report.exit_code is None else f"exit code {report.exit_code}"
        times = "once" if self.used == 1 else f"{self.used} times"
        return (
            f"workers failed {times} without progress; {self.limit} such failures are allowed. "
            f"Last: {report.cause} on rank {report.rank} (node {self.last.node}) after step {report.step}, {code}"
            f"{': ' + report.message if report.message else ''}. See that rank's log in logs/."
        )

    def _describe_unexplained(self, failure: Failure) -> str:
        step = max(self.step, failure.report.step)
        where = f"after step {step}" if step >= 0 else "before a step was reported"
        times = "1 failure" if self.used == 1 else f"{self.used} failures"
        said = f": {failure.report.message}" if failure.report.message else ""
        return (
            f"the group broke {where} although no node was lost; {times} without progress, {self.limit} allowed. Last: rank "
            f"{failure.report.rank} (node {failure.node}) lost its peers{said}. Check that the nodes reach each other (network "
            "policy, firewall, --address), and that the collective timeout is longer than a step."
        )
