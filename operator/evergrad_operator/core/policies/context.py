"""The context that all policies decide in: an observation, its memory brought up to date, and the pods in the
groups that matter. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from evergrad_common.causes import PodCause
from evergrad_operator.core.decision import Action, Decision
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.objects.names import Phase
from evergrad_operator.core.observe.coordinator_status import CoordinatorStatus
from evergrad_operator.core.observe.memory import Memory, RecordedFinish
from evergrad_operator.core.observe.observe import Observation
from evergrad_operator.core.observe.pods import PodState
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.policies.memory_update import is_current

UNREACHABLE_POD_SECONDS: Final = 10.0
"""A pod that is still there this long after its grace is taken to be on a node that does not answer."""
CLOCK_SKEW_SECONDS: Final = 300.0
"""Longest time by which the clock here is taken to be ahead of the API server's. A pod that is to be gone for
longer is given up at once, also by an operator that has just started."""


@dataclass(frozen=True)
class ReconcileContext:
    """One moment of one run. ``now``: seconds since 1970."""

    observation: Observation
    memory: Memory
    config: Config
    now: float

    @property
    def run(self) -> ParsedRun:
        """The run."""
        return self.observation.run

    @property
    def nodes(self) -> tuple[PodState, ...]:
        """All pods of nodes that the API server still has."""
        return self.observation.nodes

    @property
    def progress(self) -> CoordinatorStatus | None:
        """The answer of the run's own, newest coordinator."""
        return (
            self.observation.progress if is_current(self.observation, self.memory) else None
        )

    @property
    def ready(self) -> int:
        """Number of nodes that train: the coordinator's last count, less the pods that have ended since."""
        return min(self.memory.training.ready, sum(pod.is_running for pod in self.live))

    def is_unreachable(self, pod: PodState) -> bool:
        """Whether it cannot be known if this leaving pod still runs; it is waited for no longer."""
        # A kubelet that is there ends a pod at the end of its grace, and the pod goes.
        until = self._find_end_of_wait(pod)
        return pod.is_leaving and until is not None and self.now > until

    def _find_end_of_wait(self, pod: PodState) -> float | None:
        """Return when a leaving pod is given up; None where it is not known."""
        if pod.gone_by is None:
            return None
        # The API server's clock may be behind: the grace is over by the clock here, too.
        since = self.observation.leaving_since.get(pod.uid, float("-inf"))
        here = min(since + pod.leave_seconds, pod.gone_by + CLOCK_SKEW_SECONDS)
        return max(pod.gone_by, here) + UNREACHABLE_POD_SECONDS

    @cached_property
    def leaving(self) -> tuple[PodState, ...]:
        """Pods of nodes that are being deleted, and may still save."""
        return tuple(
            pod for pod in self.nodes if pod.is_leaving and not self.is_unreachable(pod)
        )

    @cached_property
    def live(self) -> tuple[PodState, ...]:
        """Pods of nodes that train or may still come to train."""
        return tuple(pod for pod in self.nodes if pod.is_live)

    @cached_property
    def last_holders(self) -> frozenset[int]:
        """Nodes whose leaving pod may be the only one that holds the state.

        A pod on a lost node is not waited for: whatever it holds cannot be reached.
        """
        if any(other.is_running for other in self.live):
            return frozenset()
        return frozenset(
            pod.index
            for pod in self.leaving
            if pod.is_running and pod.disruption != PodCause.NODE_LOST
        )

    @cached_property
    def preparing(self) -> tuple[PodState, ...]:
        """Pods that prepare the data, or may still come to, or are being deleted and may still run."""
        return tuple(
            pod
            for pod in self.observation.preparations
            if pod.is_live or (pod.is_leaving and not self.is_unreachable(pod))
        )

    @cached_property
    def evaluating(self) -> tuple[PodState, ...]:
        """Pods that evaluate a checkpoint, or may still come to, or are being deleted and may still run."""
        return tuple(
            pod
            for pod in self.observation.evaluations
            if pod.is_live or (pod.is_leaving and not self.is_unreachable(pod))
        )

    @property
    def seconds_to_unreachable(self) -> float | None:
        """Seconds until the next leaving pod is given up; None where none is leaving."""
        times = [
            until - self.now
            for pod in (*self.leaving, *self.preparing, *self.evaluating)
            if (until := self._find_end_of_wait(pod)) is not None
        ]
        # A second later: a pod is given up only once its time is over.
        return max(1.0, min(times) + 1.0) if times else None

    def hold(self, phase: Phase, reason: str, message: str) -> Decision:
        """Return the decision that leaves everything as it is."""
        return Decision(Action.HOLD, phase, reason, message, self.memory)

    def finished(
        self,
        phase: Phase,
        reason: str,
        message: str,
        *,
        at: float | None = None,
    ) -> "ReconcileContext":
        """Return the same moment with the run over, ``at`` seconds since 1970; None for now."""
        finish = RecordedFinish(
            phase,
            reason,
            message,
            self.now if at is None else at,
        )
        memory = replace(self.memory, finish=finish, finishing_since=None)
        return replace(self, memory=memory)
