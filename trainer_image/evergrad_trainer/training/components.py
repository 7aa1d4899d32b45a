"""Everything the training loop uses: when things happen, the components, and what observers get of them."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from evergrad_trainer.base.records import EvaluationRecord, Event, StepRecord
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.distributed.world import Membership
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.observers.stateful_observers import Lasting
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.state.registry import Registry
from evergrad_trainer.training.evaluation import EvaluationResult, EvaluationRunner
from evergrad_trainer.training.progress import TrainingProgress
from evergrad_trainer.training.snapshots import Snapshots
from evergrad_trainer.training.step import Stepper
from evergrad_trainer.training.step_parts import StepOutcome
from evergrad_trainer.training.task_adapter import Finish


@dataclass(frozen=True)
class Rhythm:
    """Due after each step with which a count reaches or passes another multiple of ``every``."""

    every: int
    per_step: int = 1
    """The amount that each step adds to that count: 1 where steps are counted."""

    def is_due(self, step: int) -> bool:
        return step * self.per_step // self.every > (step - 1) * self.per_step // self.every


@dataclass(frozen=True)
class LoopLimits:
    """When things happen, in finished steps. ``stop_after_steps`` counts the steps of this process.

    ``non_finite_in_a_row``: how many steps that are not finite are skipped before the run stops.
    ``skip_steps``: these make no update. Both may differ between processes that began before and after an
    edit; :func:`agree_limits` makes them the same. ``anchors``: steps whose checkpoints later steps need.
    """

    total_steps: int
    save_every: Rhythm | None
    """None: by the clock of rank 0."""
    evaluate_every: int | None
    """Cadence of all sets that have none of their own."""
    evaluate_sets_every: Mapping[str, int] = field(default_factory=dict)
    """Cadences of their own, by set."""
    keep_every: Rhythm | None = None
    """Cadence of checkpoints that are saved besides and never removed."""
    save_seconds: int | None = None
    """Longest time between two saves, by the clock of rank 0."""
    compare_every: int | None = None
    evaluate_at_start: bool = False
    saves_before_evaluation: bool = False
    after_step: int | None = None
    stop_after_steps: int | None = None
    non_finite_in_a_row: int = 0
    skip_steps: frozenset[int] = frozenset()
    anchors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class BestCheckpoint:
    """Which evaluation metric decides about the best checkpoint."""

    metric: str
    mode: str

    def is_better(self, value: float | None, than: Mapping[str, Any] | None) -> bool:
        """Whether a value of the metric is better than a recorded one; any number is, where that is not there
        or of another metric."""
        if value is None or not math.isfinite(value):
            return False
        # After an edit of the file: values of two metrics say nothing of one another. Older versions wrote
        # no mode.
        alike = (self.metric, self.mode)
        if than is None or (than["metric"], than.get("mode", self.mode)) != alike:
            return True
        return bool(value < than["value"] if self.mode == "min" else value > than["value"])


@dataclass
class TrainingComponents:
    """Everything the loop uses; put together in ``worker.opening``.

    ``observers`` may be replaced between two worlds; ``lasting``, the task's own, are among them on every
    rank.
    """

    limits: LoopLimits
    membership: Membership
    stepper: Stepper
    stream: TrainingStream
    checkpoints: CheckpointManager
    state: Registry
    evaluator: EvaluationRunner
    evaluation_sets: tuple[EvaluationSet, ...]
    """Those that the run evaluates itself."""
    best: BestCheckpoint | None
    observers: Observer
    directory: RunDirectory
    tokens_per_step: int
    is_signalled: Callable[[], bool]
    compare: Callable[[int], None]
    """Raises DivergedError on all ranks where their states after that step are not the same."""
    on_first_step: Callable[[], None]
    finish_state: Finish
    snapshots: Snapshots
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    lasting: Lasting = field(default_factory=lambda: Lasting(()))
    clock: Callable[[], float] = time.monotonic
    saved_at: float = field(default_factory=time.monotonic)
    """When this process began its newest save, by ``clock``."""
    is_comparing: bool = False
    """Whether replicas are compared in this world, as its ranks have agreed."""


def build_record(
    run: TrainingComponents, outcome: StepOutcome, *, total: float
) -> StepRecord:
    """The step's row. ``total``: wall seconds from the beginning of the step, as this rank measured them."""
    world = run.membership.world
    seconds = outcome.seconds
    unclaimed = total - sum(seconds.values())
    return StepRecord(
        step=outcome.step,
        generation=world.generation,
        world_size=world.size,
        loss=outcome.loss,
        tokens=0 if outcome.skipped else run.tokens_per_step,
        valid_tokens=outcome.weight,
        sample_hash=outcome.sample_hash,
        learning_rate=outcome.learning_rate,
        grad_norm=outcome.grad_norm,
        step_seconds=total,
        data_seconds=seconds["data"],
        forward_backward_seconds=seconds["forward_backward"],
        communication_seconds=seconds["communication"],
        optimizer_seconds=seconds["optimizer"],
        other_seconds=max(0.0, unclaimed),
        rank_skew_seconds=outcome.rank_skew_seconds,
        time=time.time(),
        skipped=outcome.skipped,
        metrics=outcome.metrics,
        loss_scale=outcome.loss_scale,
    )


def perplexity_of(loss: float) -> float:
    """The perplexity of a loss in nats."""
    # Beyond this e**loss is no float any more.
    largest = 700.0
    return math.exp(min(loss, largest))


def build_evaluation_record(
    run: TrainingComponents, name: str, result: EvaluationResult
) -> EvaluationRecord:
    """The row of one evaluation set."""
    return EvaluationRecord(
        step=run.progress.finished_steps,
        generation=run.membership.world.generation,
        name=name,
        loss=result.loss,
        perplexity=perplexity_of(result.loss),
        tokens=result.weight,
        seconds=result.seconds,
        time=time.time(),
        metrics=result.metrics,
    )


def emit(run: TrainingComponents, type_: str, **fields: Any) -> None:
    """Give the observers an event at the newest finished step."""
    event = Event(
        type=type_,
        time=time.time(),
        step=run.progress.finished_steps,
        generation=run.membership.world.generation,
        fields=fields,
    )
    run.observers.event(event)
