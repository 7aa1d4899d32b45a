"""The context of all policies: an observation, the updated memory, and the pods in groups. Pure."""

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
"""Time after a pod's grace period. If the pod still exists then, its host counts as unreachable."""
CLOCK_SKEW_SECONDS: Final = 300.0
"""Maximum assumed difference by which the operator's clock is ahead of the API server's clock. A pod whose
grace period ended longer ago is given up without further waiting, even by an operator that has just
started."""


@dataclass(frozen=True)
class RunPhase:
    """The phase of a run that wants to train, with its reason and message.

    ``person_at``: time from which a person has to act, in seconds since 1970; None if no person is needed.
    """

    phase: Phase
    reason: str
    message: str
    person_at: float | None = None

    def is_blocked(self, now: float) -> bool:
        """Return whether a person has to act now."""
        return self.person_at is not None and self.person_at <= now

    def seconds_to_person(self, now: float) -> float | None:
        """Return the seconds until a person has to act; None if no person is needed or one is needed now.

        The condition Stalled becomes true at that time. A pass has to be scheduled, because there may be no
        other event until then.
        """
        if self.person_at is None or self.is_blocked(now):
            return None
        return self.person_at - now


@dataclass(frozen=True)
class ReconcileContext:
    """One run at one point in time. ``now``: seconds since 1970."""

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
        """All existing pods of nodes."""
        return self.observation.nodes

    @property
    def progress(self) -> CoordinatorStatus | None:
        """The status of the run's newest coordinator; None if it has not answered."""
        return (
            self.observation.progress if is_current(self.observation, self.memory) else None
        )

    @property
    def ready(self) -> int:
        """Number of nodes that train: the coordinator's last count, limited to the number of running pods."""
        return min(self.memory.training.ready, sum(pod.is_running for pod in self.live))

    def is_unreachable(self, pod: PodState) -> bool:
        """Return whether to stop waiting for this leaving pod, because its host does not respond."""
        # A reachable kubelet ends a pod at the end of its grace period, and the pod is removed.
        until = self._find_end_of_wait(pod)
        return pod.is_leaving and until is not None and self.now > until

    def _find_end_of_wait(self, pod: PodState) -> float | None:
        """Return the time at which a leaving pod is given up, in seconds since 1970; None if unknown."""
        if pod.gone_by is None:
            return None
        # The API server's clock may be behind, so the grace period must also be over by the operator's clock.
        since = self.observation.leaving_since.get(pod.uid, float("-inf"))
        here = min(since + pod.leave_seconds, pod.gone_by + CLOCK_SKEW_SECONDS)
        return max(pod.gone_by, here) + UNREACHABLE_POD_SECONDS

    @cached_property
    def leaving(self) -> tuple[PodState, ...]:
        """Pods of nodes that are being deleted and may still save."""
        return tuple(
            pod for pod in self.nodes if pod.is_leaving and not self.is_unreachable(pod)
        )

    @cached_property
    def live(self) -> tuple[PodState, ...]:
        """Pods of nodes that run or may still start."""
        return tuple(pod for pod in self.nodes if pod.is_live)

    @cached_property
    def last_holders(self) -> frozenset[int]:
        """Nodes whose leaving pod may be the only pod that holds the state.

        Pods on lost hosts are left out, because their state cannot be reached.
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
        """Preparation pods that run, may still start, or are being deleted and may still run."""
        return tuple(
            pod
            for pod in self.observation.preparations
            if pod.is_live or (pod.is_leaving and not self.is_unreachable(pod))
        )

    @cached_property
    def evaluating(self) -> tuple[PodState, ...]:
        """Evaluation pods that run, may still start, or are being deleted and may still run."""
        return tuple(
            pod
            for pod in self.observation.evaluations
            if pod.is_live or (pod.is_leaving and not self.is_unreachable(pod))
        )

    @property
    def seconds_to_unreachable(self) -> float | None:
        """Seconds until the next leaving pod is given up; None if no pod is leaving."""
        times = [
            until - self.now
            for pod in (*self.leaving, *self.preparing, *self.evaluating)
            if (until := self._find_end_of_wait(pod)) is not None
        ]
        # Add a second, because a pod is given up only after its time is over.
        return max(1.0, min(times) + 1.0) if times else None

    def hold(self, phase: Phase, reason: str, message: str) -> Decision:
        """Return the decision that changes nothing."""
        return Decision(Action.HOLD, phase, reason, message, self.memory)

    def finished(
        self,
        phase: Phase,
        reason: str,
        message: str,
        *,
        at: float | None = None,
    ) -> "ReconcileContext":
        """Return the context with the run over. ``at``: end in seconds since 1970; None for ``now``."""
        finish = RecordedFinish(
            phase,
            reason,
            message,
            self.now if at is None else at,
        )
        memory = replace(self.memory, finish=finish, finishing_since=None)
        return replace(self, memory=memory)
