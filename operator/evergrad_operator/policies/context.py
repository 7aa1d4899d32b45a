"""The context that all policies decide in: an observation, its memory brought up to date, and the pods in the
groups that matter. Pure."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from evergrad_operator.config import Config
from evergrad_operator.decision import Action, Decision
from evergrad_operator.memory import Finish, Memory
from evergrad_operator.names import Phase, claim_annotation
from evergrad_operator.observe import Observation, Progress, Record, build_record
from evergrad_operator.pods import PodState
from evergrad_operator.policies.remember import is_current
from evergrad_operator.spec import TrainingRun

UNREACHABLE_POD_SECONDS: Final = 10.0
"""A pod that is still there so long after its grace is on a node that answers nobody."""


@dataclass(frozen=True)
class ReconcileContext:
    """One moment of one run. ``now``: seconds since 1970."""

    observation: Observation
    memory: Memory
    config: Config
    now: float

    @property
    def run(self) -> TrainingRun:
        """The run."""
        return self.observation.run

    @property
    def nodes(self) -> tuple[PodState, ...]:
        """All pods of nodes that the API server still has."""
        return self.observation.nodes

    @property
    def progress(self) -> Progress | None:
        """What the run's own, newest coordinator says."""
        return self.observation.progress if is_current(self.observation, self.memory) else None

    @cached_property
    def current(self) -> tuple[PodState, ...]:
        """Pods of nodes that belong to this restart of the run."""
        return tuple(pod for pod in self.nodes if pod.restart == self.memory.restart)

    @property
    def ready(self) -> int:
        """Nodes that train, as far as known: what the coordinator said last, less the pods that have ended
        since."""
        return min(self.memory.training.ready, sum(pod.is_running for pod in self.live))

    def is_unreachable(self, pod: PodState) -> bool:
        """Whether nobody can tell if this leaving pod still runs; it is waited for no longer."""
        return (
            pod.is_leaving
            and pod.gone_by is not None
            and self.now > pod.gone_by + UNREACHABLE_POD_SECONDS
        )

    @cached_property
    def leaving(self) -> tuple[PodState, ...]:
        """Pods of nodes that are being deleted, and may still save."""
        return tuple(
            pod for pod in self.nodes if pod.is_leaving and not self.is_unreachable(pod)
        )

    @cached_property
    def live(self) -> tuple[PodState, ...]:
        """Pods of nodes that train or may come to it."""
        return tuple(pod for pod in self.nodes if pod.is_live)

    @property
    def seconds_to_unreachable(self) -> float | None:
        """Until the next leaving pod is given up."""
        times = [
            pod.gone_by + UNREACHABLE_POD_SECONDS - self.now
            for pod in self.leaving
            if pod.gone_by is not None
        ]
        return max(1.0, min(times) + 1.0) if times else None

    @property
    def own_record(self) -> Record | None:
        """What the PVC says of this run's name."""
        claim = self.observation.claim
        return claim.records.get(self.run.name) if claim else None

    def build_record(self, epoch: int) -> Record:
        """What the PVC shall say of this run."""
        run = self.run
        return Record(
            run=run.name,
            path=run.volume_path,
            recipe=self.memory.recipe_hash,
            epoch=epoch,
            uid=run.uid,
            created_at=run.created_at,
            complete=self.own_record.complete
            if self.own_record and self.own_record.uid == run.uid
            else None,
        )

    def has_recipe(self, record: Record) -> bool:
        """Return whether a record on the PVC is of this run's recipe, in meaning or, in a record of an older
        version, in spelling."""
        parsed = self.run.parsed
        known = {self.memory.recipe_hash, parsed.recipe_hash, parsed.spelling_hash}
        return record.recipe in known

    def is_recorded(self, record: Record) -> bool:
        """Whether the PVC says exactly this."""
        claim = self.observation.claim
        return claim is not None and claim.annotations.get(
            claim_annotation(self.run.name)
        ) == build_record(record)

    def hold(self, phase: Phase, reason: str, message: str) -> Decision:
        """Nothing is touched."""
        return Decision(Action.HOLD, phase, reason, message, self.memory)

    def finished(self, phase: Phase, reason: str, message: str) -> "ReconcileContext":
        """The same moment, with the run over."""
        return replace(
            self,
            memory=replace(
                self.memory,
                finish=Finish(phase, reason, message, self.now),
                finishing_since=None,
            ),
        )

    def at(self, seconds: float) -> "ReconcileContext":
        """The same end, at another time: seconds since 1970."""
        finish = self.memory.finish
        return (
            self
            if finish is None
            else replace(self, memory=replace(self.memory, finish=replace(finish, at=seconds)))
        )
