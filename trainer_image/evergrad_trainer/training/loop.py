"""The training paragraph: step → observers → evaluation → saving → stop checks, until the horizon or a
request to stop. Its state is :mod:`evergrad_trainer.training.progress`."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from evergrad_manifest.errors import Problem
from evergrad_trainer.checkpoint.manager import CheckpointManager
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.errors import FencedError
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.observers.lasting import Lasting
from evergrad_trainer.records import EvaluationRecord, Event, EventType, StepRecord, StopReason
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.state.registry import Registry, to_extra
from evergrad_trainer.training.calls import Finish
from evergrad_trainer.training.evaluation import EvaluationResult, EvaluationRunner
from evergrad_trainer.training.exchange import (
    FLAG_CHANGE,
    FLAG_EVALUATE,
    FLAG_FENCED,
    FLAG_OBSERVER_OFF,
    FLAG_SAVE,
    FLAG_SIGNAL,
    FLAG_STOP,
    FLAG_STOP_FILE,
    NUM_FLAGS,
)
from evergrad_trainer.training.progress import Progress, published_step
from evergrad_trainer.training.step import StepOutcome, Stepper
from evergrad_trainer.world import Membership, World

Flags = tuple[bool, ...]
_QUIET: Flags = (False,) * NUM_FLAGS
"""Nobody wishes for anything."""


@dataclass(frozen=True)
class Limits:
    """When things happen, in finished steps. ``stop_after_steps`` counts the steps of this process.

    ``non_finite_in_a_row``: how many steps that are not finite are skipped before the run stops.
    ``skip_steps``: these make no update. Both may differ between processes that began before and after an
    edit; :func:`train` has them agree.
    """

    total_steps: int
    save_every: int
    evaluate_every: int | None
    compare_every: int | None = None
    evaluate_at_start: bool = False
    after_step: int | None = None
    stop_after_steps: int | None = None
    non_finite_in_a_row: int = 0
    skip_steps: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Best:
    """Which evaluation metric decides about the best checkpoint."""

    metric: str
    mode: str

    def is_better(self, value: float, than: float | None) -> bool:
        if not math.isfinite(value):
            return False
        return than is None or (value < than if self.mode == "min" else value > than)


@dataclass
class Run:
    """Everything the loop uses; put together in ``worker.opening``.

    ``observers`` may be replaced between two worlds; ``lasting``, the task's own, are among them on every
    rank.
    """

    limits: Limits
    membership: Membership
    stepper: Stepper
    stream: TrainingStream
    checkpoints: CheckpointManager
    state: Registry
    evaluator: EvaluationRunner
    evaluation_sets: tuple[EvaluationSet, ...]
    best: Best | None
    observers: Observer
    directory: RunDirectory
    tokens_per_step: int
    is_signalled: Callable[[], bool]
    compare: Callable[[int], None]
    """Raises DivergedError on all ranks where their states after that step are not the same."""
    on_first_step: Callable[[], None]
    finish_state: Finish
    progress: Progress = field(default_factory=Progress)
    lasting: Lasting = field(default_factory=lambda: Lasting(()))
    is_comparing: bool = False
    """Whether replicas are compared in this world, as its ranks have agreed."""


def train(run: Run) -> StopReason:
    """Train until the horizon or until all ranks agree to stop; the caller saves what is not saved then.

    "change" means that the ranks agreed to leave this world: ``train`` is called again in the next one. The
    state is saved only where nobody goes on with it. "non_finite": the next step was not finite, more often
    in a row than may be skipped; ``progress.refusal`` says why. Raises SaveError or FencedError (all ranks
    together); then nothing was saved after the last checkpoint. Raises DivergedError (all ranks together)
    where replicas are found to differ; nothing was saved since they were equal. Raises PeerLostError where
    the world has ended; ``progress.finished_steps`` is what this process holds.
    """
    world, progress = run.membership.world, run.progress
    # Collective: ranks may have read the file before and after an edit.
    limits = _agree(run.limits, world)
    run.is_comparing = limits.compare_every is not None
    first = progress.finished_steps + 1

    # What the world before this one was to do after its last step, and did not get to.
    reason = _pause(run, limits, _QUIET, is_entering=True)

    while reason is None:
        step, begun = progress.finished_steps + 1, time.perf_counter()

        # Collectives: all those of a step are in Stepper.run. Whatever one rank wished for before it, every
        # rank knows after it.
        outcome = run.stepper.run(
            step, world, _own_flags(run), is_skipped=step in limits.skip_steps
        )
        if outcome.is_non_finite:
            # The state before this step is whole on every rank: it is saved before anything else may happen
            # to it.
            _raise_if_fenced(outcome)
            if progress.non_finite == 0:
                _save(run)
            if progress.non_finite >= limits.non_finite_in_a_row:
                return _refuse(run, outcome)

        # No collective until the step is counted: this rank has made the update, whatever becomes of others.
        _finish_step(run, outcome, begun)
        _raise_if_fenced(outcome)
        # After the fence: it writes into the run directory, which may be a newer process's by now.
        if step == first:
            run.on_first_step()

        # Collectives: evaluation and save, as all ranks find them due, since they know the same.
        reason = _pause(run, limits, outcome.flags)

    # Collective: not all ranks may have heard yet why they leave, so one that knows speaks for all.
    if reason == "change" and not world.all_agree(not run.membership.saves_first()):
        save_together(run)
    return reason


def _pause(
    run: Run, limits: Limits, flags: Flags, *, is_entering: bool = False
) -> StopReason | None:
    """Do what is due after the newest finished step; why all ranks leave then, the same on each.

    Evaluated before it is saved, so that the checkpoint knows of it. ``is_entering``: the ranks have just
    met, and compared their states there.
    """
    if flags[FLAG_OBSERVER_OFF]:
        # Collective: an observer that has failed on one rank is switched off on all of them, so that what it
        # remembers and asks for does not depend on which rank is lost.
        names = run.membership.world.gather_json(sorted(run.lasting.switched_off))
        run.lasting.agree_switched_off({name for row in names for name in row})

    interrupted = _evaluate(run) if _is_evaluation_due(run) else None
    step = run.progress.finished_steps
    if _is_save_due(run):
        _save(run)
    elif not is_entering and _is_due(step, limits.compare_every):
        run.compare(step)
    run.checkpoints.poll()
    # An evaluation that was cut short comes first: what it was part of is not over.
    return interrupted or _stop_reason(run, flags)


def _agree(limits: Limits, world: World) -> Limits:
    """The limits as all ranks take them: some processes may have read the file before it was
    edited in place."""
    rows = world.gather_json(
        [limits.non_finite_in_a_row, sorted(limits.skip_steps), limits.compare_every]
    )
    skip_steps = frozenset(step for _, steps, _ in rows for step in steps)
    in_a_row = max(number for number, _, _ in rows)
    # Rank 0's: a comparison that only some make would wait for the others for ever.
    return replace(
        limits, non_finite_in_a_row=in_a_row, skip_steps=skip_steps, compare_every=rows[0][2]
    )


def _own_flags(run: Run) -> Flags:
    """This rank's wishes, in the order of the FLAG_ constants; the stop file and the fence are rank 0's to
    watch."""
    is_main = run.membership.world.is_main
    flags = [False] * NUM_FLAGS
    # A save that a join abandons is made again from its beginning: with a join a minute, a large one would
    # never be published.
    flags[FLAG_CHANGE] = run.membership.is_changing(is_saving=run.checkpoints.is_saving)
    flags[FLAG_SIGNAL] = run.is_signalled()
    flags[FLAG_STOP_FILE] = is_main and run.directory.stop_requested()
    flags[FLAG_FENCED] = is_main and run.checkpoints.is_fenced()
    # Observers with a state run on every rank; what any of them asks for, all ranks do.
    wishes = run.observers.wishes()
    flags[FLAG_STOP], flags[FLAG_SAVE] = "stop" in wishes, "save" in wishes
    flags[FLAG_EVALUATE] = "evaluate" in wishes
    flags[FLAG_OBSERVER_OFF] = run.lasting.is_disagreeing
    return tuple(flags)


def _stop_reason(run: Run, flags: Flags) -> StopReason | None:
    """Why all ranks leave after the newest finished step; the same on each, since it depends on agreed flags
    and on counts only."""
    limits, progress = run.limits, run.progress
    if progress.finished_steps >= limits.total_steps:
        return "complete"
    if flags[FLAG_SIGNAL]:
        return "signal"
    if flags[FLAG_STOP_FILE]:
        return "stop_file"
    if limits.after_step is not None and progress.finished_steps >= limits.after_step:
        return "after_step"
    if limits.stop_after_steps is not None and progress.steps_here >= limits.stop_after_steps:
        return "stop_after_steps"
    if flags[FLAG_STOP]:
        return "observer"
    return "change" if flags[FLAG_CHANGE] else None


def _finish_step(run: Run, outcome: StepOutcome, begun: float) -> None:
    """Count the step, whether or not it made an update, and report it."""
    progress = run.progress
    run.finish_state(outcome, run.stream.entered_after(outcome.step))
    progress.finished_steps = outcome.step
    progress.steps_here += 1
    if outcome.skipped is None:
        progress.updates += 1
    else:
        progress.skipped += 1
    if outcome.skipped != "requested":
        # A step that was passed over says nothing about whether the ones around it are finite.
        progress.non_finite = progress.non_finite + 1 if outcome.is_non_finite else 0
    # Remembered, and not done at once: a world that breaks in the evaluation leaves the save to the next one.
    if outcome.flags[FLAG_EVALUATE]:
        progress.evaluation_asked = outcome.step
    if outcome.flags[FLAG_SAVE]:
        progress.save_asked = outcome.step

    record = _build_record(run, outcome, total=time.perf_counter() - begun)
    progress.last_record = record
    run.observers.step_end(record)
    if outcome.skipped is not None:
        message = (
            _words(outcome)
            or f"step {outcome.step}: passed over; spec.training.skipSteps names it."
        )
        emit(
            run,
            EventType.SKIPPED,
            why=outcome.skipped,
            message=message,
            in_a_row=progress.non_finite,
        )


def _build_record(run: Run, outcome: StepOutcome, *, total: float) -> StepRecord:
    """The step's row. ``total``: wall seconds from the beginning of the step, as this rank measured them."""
    world, seconds = run.membership.world, outcome.seconds
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
        other_seconds=max(0.0, total - sum(seconds.values())),
        rank_skew_seconds=outcome.rank_skew_seconds,
        time=time.time(),
        skipped=outcome.skipped,
        metrics=outcome.metrics,
    )


def _refuse(run: Run, outcome: StepOutcome) -> StopReason:
    """The run stops before this step."""
    progress = run.progress
    progress.refusal = _words(outcome)
    emit(
        run,
        EventType.NON_FINITE,
        why=outcome.skipped,
        message=progress.refusal,
        in_a_row=progress.non_finite + 1,
    )
    return "non_finite"


def _words(outcome: StepOutcome) -> str:
    return "\n".join(str(problem) for problem in outcome.problems)


def _raise_if_fenced(outcome: StepOutcome) -> None:
    if outcome.flags[FLAG_FENCED]:
        raise FencedError(
            Problem(
                "run directory",
                "a newer process trains this run",
                (
                    f"it has claimed the directory since; this one leaves after step {outcome.step} "
                    "without writing"
                ),
                "Let the newer one go on, or stop it before starting another",
            )
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _is_evaluation_due(run: Run) -> bool:
    """After the newest finished step, or before the first; also where a stop or a lost peer cut it short."""
    progress, limits = run.progress, run.limits
    step = progress.finished_steps
    if not run.evaluation_sets or progress.evaluated_step >= step:
        return False
    if step == 0:
        return limits.evaluate_at_start
    is_asked = step in (limits.total_steps, progress.evaluation_asked)
    return is_asked or _is_due(step, limits.evaluate_every)


def _evaluate(run: Run) -> StopReason | None:
    """Evaluate all sets.

    Returns the reason when a stop or a change cut it short; it is then repeated after the resume.
    """
    world, progress = run.membership.world, run.progress
    values: dict[str, float] = {}
    records: list[EvaluationRecord] = []
    for one in run.evaluation_sets:
        # Collective: all ranks share the batches of a set, and all of them end it early, or none.
        result = run.evaluator.run(
            one,
            world,
            stage=run.stream.stage(max(1, progress.finished_steps)),
            is_stopping=lambda: (
                run.is_signalled()
                or run.membership.is_changing(is_saving=run.checkpoints.is_saving)
            ),
            on_progress=functools.partial(run.observers.evaluation_progress, one.name),
        )
        if result is None:
            return "signal" if not world.all_agree(not run.is_signalled()) else "change"
        measured = {"loss": result.loss, **result.metrics}
        values |= {f"{one.name}/{metric}": value for metric, value in measured.items()}
        records.append(_build_evaluation_record(run, one.name, result))

    # Not set by set: an evaluation that is cut short is made again, and observers with a state that is
    # transferred and restored must have heard of it once.
    for record in records:
        run.observers.evaluation_end(record)
    progress.evaluated_step = progress.finished_steps
    _keep_best(run, values)
    return None


def _build_evaluation_record(run: Run, name: str, result: EvaluationResult) -> EvaluationRecord:
    return EvaluationRecord(
        step=run.progress.finished_steps,
        generation=run.membership.world.generation,
        name=name,
        loss=result.loss,
        perplexity=math.exp(min(result.loss, 700.0)),
        tokens=result.weight,
        seconds=result.seconds,
        time=time.time(),
        metrics=result.metrics,
    )


def _keep_best(run: Run, values: dict[str, float]) -> None:
    if run.best is None or run.best.metric not in values or run.progress.finished_steps == 0:
        return
    value = values[run.best.metric]
    than = run.progress.best["value"] if run.progress.best else None
    if run.best.is_better(value, than):
        step = run.progress.finished_steps
        run.progress.best = {"metric": run.best.metric, "value": value, "step": step}
        if run.progress.saved_step == step:
            # Saved before an evaluation that a stop or a lost peer had cut short: the checkpoint is
            # published, or on its way.
            run.checkpoints.mark_best(step)
        _save(run, best=True)


def _is_save_due(run: Run) -> bool:
    """The one rule of when to save, but for the end of the run and the best checkpoint."""
    progress = run.progress
    is_asked = progress.save_asked == progress.finished_steps
    return (
        is_asked
        or progress.is_save_lost
        or _is_due(progress.finished_steps, run.limits.save_every)
    )


def _save(run: Run, *, best: bool = False, wait: bool = False) -> None:
    """Begin to save the newest step, unless that was begun; ``wait``: until it is published."""
    progress = run.progress
    step, progress.is_save_lost = progress.finished_steps, False
    if progress.saved_step == step or step == 0:
        return
    if run.is_comparing:
        # Every rank writes a part: replicas that differ would make a checkpoint of several states.
        run.compare(step)
    # This save is what was asked for: its checkpoint must not ask for it again.
    asked, progress.save_asked = progress.save_asked, -1
    try:
        run.checkpoints.save(
            step, run.state.tensors(), extra=to_extra(run.state.values()), best=best, wait=wait
        )
    except BaseException:
        progress.save_asked = asked
        raise
    progress.saved_step = step


def save_together(run: Run) -> None:
    """Save what is not saved yet, or whose save has failed, and wait for it; ``progress.saved_step`` is what
    is published then.

    Raises SaveError or FencedError (all ranks together).
    """
    progress = run.progress
    run.checkpoints.wait()
    progress.saved_step = published_step(progress, run.checkpoints)
    if progress.saved_step != progress.finished_steps:
        _save(run, wait=True)
        progress.saved_step = published_step(progress, run.checkpoints)


def emit(run: Run, type_: str, **fields: Any) -> None:
    """Give the observers an event at the newest finished step."""
    event = Event(
        type=type_,
        time=time.time(),
        step=run.progress.finished_steps,
        generation=run.membership.world.generation,
        fields=fields,
    )
    run.observers.event(event)
