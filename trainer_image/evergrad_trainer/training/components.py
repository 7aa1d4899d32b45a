"""The components of the training loop, the limits that control it, and the records that observers receive."""

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
    """Due after each step with which a count reaches or passes another multiple of ``every``.

    For example, with ``every=100`` and ``per_step=30``, it is due after step 4, when the count reaches 120.
    """

    every: int
    per_step: int = 1
    """The amount that each step adds to the count: 1 to count steps."""

    def is_due(self, step: int) -> bool:
        return step * self.per_step // self.every > (step - 1) * self.per_step // self.every


@dataclass(frozen=True)
class LoopLimits:
    """When the loop saves, evaluates and stops, in finished steps.

    ``stop_after_steps`` counts the steps of this process. ``anchors``: steps whose checkpoints later steps
    need. ``non_finite_in_a_row``: how many non-finite steps in a row are skipped before the run stops.
    ``skip_steps``: these steps make no update. The last two may differ between processes that started before
    and after an edit of the file; :func:`agree_limits` makes them equal.
    """

    total_steps: int
    save_every: Rhythm | None
    """None: the clock of rank 0 decides."""
    evaluate_every: int | None
    """Cadence of all sets that have no cadence of their own."""
    evaluate_sets_every: Mapping[str, int] = field(default_factory=dict)
    """Cadences of single sets, by name of the set."""
    keep_every: Rhythm | None = None
    """Cadence of additional checkpoints that are never removed."""
    save_seconds: int | None = None
    """Longest time between two saves, in seconds by the clock of rank 0."""
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
    """The evaluation metric that selects the best checkpoint."""

    metric: str
    mode: str

    def is_better(self, value: float | None, than: Mapping[str, Any] | None) -> bool:
        """Return whether a value of the metric is better than a recorded one.

        Any finite value is better if no value, or a value of another metric or mode, was recorded.
        """
        if value is None or not math.isfinite(value):
            return False
        # The metric may have changed in an edit of the file; values of two metrics cannot be compared. Older
        # versions recorded no mode.
        alike = (self.metric, self.mode)
        if than is None or (than["metric"], than.get("mode", self.mode)) != alike:
            return True
        return bool(value < than["value"] if self.mode == "min" else value > than["value"])


@dataclass
class TrainingComponents:
    """Everything the loop uses, assembled in ``worker.setup``.

    ``observers`` may be replaced between two worlds. ``lasting``: the task's own observers, which are among
    ``observers`` on every rank.
    """

    limits: LoopLimits
    membership: Membership
    stepper: Stepper
    stream: TrainingStream
    checkpoints: CheckpointManager
    state: Registry
    evaluator: EvaluationRunner
    evaluation_sets: tuple[EvaluationSet, ...]
    """The sets that the run evaluates itself."""
    best: BestCheckpoint | None
    observers: Observer
    directory: RunDirectory
    tokens_per_step: int
    is_signalled: Callable[[], bool]
    compare: Callable[[int], None]
    """Raises DivergedError on all ranks if their states after that step differ."""
    on_first_step: Callable[[], None]
    finish_state: Finish
    snapshots: Snapshots
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    lasting: Lasting = field(default_factory=lambda: Lasting(()))
    clock: Callable[[], float] = time.monotonic
    saved_at: float = field(default_factory=time.monotonic)
    """When this process began its newest save, by ``clock``."""
    is_comparing: bool = False
    """Whether replicas are compared in this world; all ranks have agreed on it."""


def build_record(
    run: TrainingComponents, outcome: StepOutcome, *, total: float
) -> StepRecord:
    """Return the record of a step. ``total``: seconds from the start of the step, as this rank measured
    them."""
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
    """Return the perplexity of a loss in nats."""
    # exp of a larger loss overflows a float.
    largest = 700.0
    return math.exp(min(loss, largest))


def build_evaluation_record(
    run: TrainingComponents, name: str, result: EvaluationResult
) -> EvaluationRecord:
    """Return the record of the evaluation of one set."""
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
    """Send the observers an event at the newest finished step."""
    event = Event(
        type=type_,
        time=time.time(),
        step=run.progress.finished_steps,
        generation=run.membership.world.generation,
        fields=fields,
    )
    run.observers.event(event)
