"""The training loop. Each iteration runs a step, notifies observers, evaluates, saves, and checks whether to
stop. Its state is :mod:`evergrad_trainer.training.progress`."""

import functools
import time

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import FencedError
from evergrad_trainer.base.records import EvaluationRecord, EventType, StopReason
from evergrad_trainer.checkpoint.manifest import PERMANENT
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.state.registry import to_extra
from evergrad_trainer.training.components import (
    LoopLimits,
    TrainingComponents,
    build_evaluation_record,
    build_record,
    emit,
)
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
from evergrad_trainer.training.progress import published_step
from evergrad_trainer.training.schedule import (
    agree_limits,
    due_sets,
    find_stop_reason,
    is_due,
    is_save_due,
)
from evergrad_trainer.training.step_parts import StepOutcome

Flags = tuple[bool, ...]
_QUIET: Flags = (False,) * NUM_FLAGS
"""No rank requests anything."""
_FIRST_PAUSE_SECONDS = 5.0
"""Pause after a failed save that the next step waits for. The two pauses between three attempts last about
as long as the failover of a storage server."""
_LONGEST_PAUSE_SECONDS = 20.0
"""Longest of these pauses; each pause is twice as long as the previous pause."""
_NAP_SECONDS = 0.1
"""Seconds between two checks, during such a pause, of whether the group was given up."""


def train(run: TrainingComponents) -> StopReason:
    """Train until the horizon or until all ranks agree to stop; the caller saves the remaining state.

    "change" means that the ranks agreed to leave this world: ``train`` is called again in the next one. The
    state is saved only if no other process continues with it. "non_finite": the next step was not finite, and
    the limit of such steps in a row is reached; ``progress.refusal`` says why. Raises SaveError or
    FencedError (all ranks together); then nothing was saved after the last checkpoint. Raises DivergedError
    (all ranks together) if replicas differ; nothing was saved since they were equal. Raises PeerLostError
    if the world has ended; ``progress.finished_steps`` is the step whose state this process holds.
    """
    world, progress = run.membership.world, run.progress
    # Collective: ranks may have read the file before and after an edit.
    limits = agree_limits(run.limits, world)
    run.is_comparing = limits.compare_every is not None
    first = progress.finished_steps + 1

    # Work after the last step that the previous world did not finish.
    reason = _pause(run, limits, _QUIET, is_entering=True)
    # If an observer has stopped the run, a new start trains nothing while the observer requests a stop.
    if reason is None and progress.stop_asked == progress.finished_steps > 0:
        # Collective: an observer that fails on one rank requests nothing there.
        is_wished = not world.all_agree("stop" not in run.lasting.wishes())
        reason = "observer" if is_wished else None

    while reason is None:
        step = progress.finished_steps + 1
        begun = time.perf_counter()

        # Collectives: all those of a step are in Stepper.run. The exchange also shares each
        # rank's requests (stop, save, evaluate).
        outcome = run.stepper.run(
            step, world, _own_flags(run), is_skipped=step in limits.skip_steps
        )
        if outcome.is_non_finite:
            # The state before this step is complete on every rank: save it before anything can change it.
            _raise_if_fenced(outcome)
            if progress.non_finite == 0:
                _save(run)
            if progress.non_finite >= limits.non_finite_in_a_row:
                progress.refusal = _describe_skip(outcome)
                _emit_skip(
                    run, EventType.NON_FINITE, outcome, in_a_row=progress.non_finite + 1
                )
                return "non_finite"

        # No collective until the step is counted: this rank has made the update, even if others fail.
        _finish_step(run, outcome, begun)
        _raise_if_fenced(outcome)
        # After the fence: it writes into the run directory, which may belong to a newer process by now.
        if step == first:
            run.on_first_step()

        # Collectives: evaluation and save. All ranks find the same work due, from the same values.
        reason = _pause(run, limits, outcome.flags)

    # Collective: some ranks may not have the reason for leaving yet, so one rank that has it is enough.
    if reason == "change" and not world.all_agree(not run.membership.saves_first()):
        save_together(run)
    return reason


def _pause(
    run: TrainingComponents, limits: LoopLimits, flags: Flags, *, is_entering: bool = False
) -> StopReason | None:
    """Do the work due after the newest finished step; return why all ranks leave, or None.

    The result is the same on each rank. The evaluation comes before the save, unless the limits request a
    save first, so that the checkpoint contains its results. ``is_entering``: whether the ranks have just
    formed the world, and compared their states in doing so.
    """
    if flags[FLAG_OBSERVER_OFF]:
        # Collective: an observer that has failed on one rank is switched off on all of them, so that its
        # state and requests do not depend on which rank is lost.
        names = run.membership.world.gather_json(sorted(run.lasting.switched_off))
        run.lasting.agree_switched_off({name for row in names for name in row})

    progress, best = run.progress, run.progress.best
    # Mark the best checkpoint again if the previous world ended before it was marked, and at a start: the
    # marked checkpoint may be damaged, so that training resumes from an older checkpoint. Groups that form
    # again during training need not check this.
    if (
        is_entering
        and run.best is not None
        and best is not None
        and best["step"] <= progress.saved_step
        and (best["step"] == progress.finished_steps or progress.steps_here == 0)
    ):
        run.checkpoints.mark_best(best["step"])
    interrupted: StopReason | None = None
    if sets := due_sets(run):
        if limits.saves_before_evaluation:
            # Collectives, as below. The next checkpoint contains the results, because a published checkpoint
            # never changes.
            _save(run)
        # Collectives: all ranks share the batches.
        interrupted = _evaluate(run, sets)

    if is_save_due(run):
        # Collectives: replicas are compared, then each rank writes its part.
        _save(run)
    elif not is_entering and is_due(progress.finished_steps, limits.compare_every):
        # Collective: each rank contributes one number.
        run.compare(progress.finished_steps)
    if progress.finished_steps in limits.anchors and interrupted is None:
        # Collectives: a checkpoint that all later steps need is published before the first of them.
        _anchor(run)
    run.checkpoints.poll()
    # Return the interruption first, because the step is not finished until its evaluation is.
    return interrupted or find_stop_reason(run.limits, progress, flags)


def _own_flags(run: TrainingComponents) -> Flags:
    """Return this rank's requests, in the order of the FLAG_ constants; only rank 0 watches the stop file and
    the fence."""
    is_main = run.membership.world.is_main
    flags = [False] * NUM_FLAGS
    # A save that a join abandons starts again from the beginning: with a join per minute, a large save would
    # never be published.
    flags[FLAG_CHANGE] = run.membership.is_changing(is_saving=run.checkpoints.is_saving)
    flags[FLAG_SIGNAL] = run.is_signalled()
    flags[FLAG_STOP_FILE] = is_main and run.directory.stop_requested()
    flags[FLAG_FENCED] = is_main and run.checkpoints.is_fenced()
    # Observers with a state run on every rank; if one of them requests something, all ranks do it.
    wishes = run.observers.wishes()
    flags[FLAG_STOP] = "stop" in wishes
    # Only rank 0's clock decides when a save is due, so that the ranks' clocks need not agree.
    seconds = run.limits.save_seconds
    is_time = is_main and seconds is not None and run.clock() - run.saved_at >= seconds
    flags[FLAG_SAVE] = is_time or "save" in wishes
    flags[FLAG_EVALUATE] = "evaluate" in wishes
    flags[FLAG_OBSERVER_OFF] = run.lasting.is_disagreeing
    return tuple(flags)


def _finish_step(run: TrainingComponents, outcome: StepOutcome, begun: float) -> None:
    """Count the step, whether or not it made an update, and report it."""
    progress = run.progress
    entered = run.stream.entered_after(outcome.step)
    # Finish the task's part of the state before the step is recorded as finished, because it belongs to the
    # step.
    run.finish_state(outcome, entered)
    progress.finished_steps = outcome.step
    progress.forget_tallies()
    progress.steps_here += 1
    if outcome.skipped is None:
        progress.updates += 1
    else:
        progress.skipped += 1
    if outcome.is_non_finite:
        progress.non_finite += 1
    elif outcome.skipped not in ("requested", "overflow"):
        # A skipped step does not show whether the steps around it are finite, and a step that only lowered
        # the fp16 loss scale hardly does.
        progress.non_finite = 0

    # Record the requests instead of fulfilling them here: if the world breaks in the evaluation, the next
    # world still makes the save.
    if outcome.flags[FLAG_EVALUATE]:
        progress.evaluation_asked = outcome.step
    if outcome.flags[FLAG_SAVE]:
        progress.save_asked = outcome.step
    if outcome.flags[FLAG_STOP]:
        progress.stop_asked = outcome.step

    total = time.perf_counter() - begun
    record = build_record(run, outcome, total=total)
    progress.last_record = record
    run.observers.step_end(record)
    if outcome.skipped is not None:
        _emit_skip(run, EventType.SKIPPED, outcome, in_a_row=progress.non_finite)


def _emit_skip(
    run: TrainingComponents, type_: str, outcome: StepOutcome, *, in_a_row: int
) -> None:
    """Record why a step made no update. ``in_a_row``: how many of the newest steps were not finite."""
    message = _describe_skip(outcome)
    emit(run, type_, why=outcome.skipped, message=message, in_a_row=in_a_row)


def _describe_skip(outcome: StepOutcome) -> str:
    if outcome.skipped == "requested":
        return f"step {outcome.step}: passed over; spec.training.skipSteps names it."
    return "\n".join(str(problem) for problem in outcome.problems)


def _raise_if_fenced(outcome: StepOutcome) -> None:
    if not outcome.flags[FLAG_FENCED]:
        return
    why = f"it has claimed the directory since; this one leaves after step {outcome.step} without writing"
    raise FencedError(
        Problem(
            "run directory",
            "a newer process trains this run",
            why,
            "Let the newer one go on, or stop it before starting another",
        )
    )


def _evaluate(
    run: TrainingComponents, sets: tuple[EvaluationSet, ...]
) -> StopReason | None:
    """Evaluate these sets.

    Returns the reason if a stop or a change interrupted it; it then continues after the resume.
    """
    world, progress = run.membership.world, run.progress
    stage = run.stream.stage(max(1, progress.finished_steps))
    values: dict[str, float] = {}
    records: list[EvaluationRecord] = []

    def is_stopping() -> bool:
        if run.is_signalled():
            return True
        return run.membership.is_changing(is_saving=run.checkpoints.is_saving)

    for one in sets:
        tally = run.evaluator.open_tally(
            one, progress.tallies.get(one.name, {}), stage=stage
        )
        done_before = tally.done
        # Collectives: all ranks share the batches of a set, and all of them end it early, or none.
        try:
            result = run.evaluator.run(
                one,
                world,
                tally,
                stage=stage,
                is_stopping=is_stopping,
                on_progress=functools.partial(run.observers.evaluation_progress, one.name),
            )
        finally:
            # Also if the world has ended: the next world, or a later start, continues from there.
            progress.tallies[one.name] = tally.to_json()
            progress.is_tally_unsaved |= tally.done > done_before
        if result is None:
            # Collective: ranks that were cut short by another's signal leave for the same reason.
            is_signal = not world.all_agree(not run.is_signalled())
            return "signal" if is_signal else "change"
        record = build_evaluation_record(run, one.name, result)
        measured = {"loss": record.loss, "perplexity": record.perplexity, **result.metrics}
        values |= {f"{one.name}/{metric}": value for metric, value in measured.items()}
        records.append(record)

    # Notify observers after all sets, not after each set: an interrupted evaluation continues later, and
    # observers whose state is transferred and restored must receive each result once.
    for record in records:
        run.observers.evaluation_end(record)
    progress.evaluated_step = progress.finished_steps
    progress.forget_tallies()
    _keep_best(run, values)
    return None


def _settle_best(run: TrainingComponents) -> None:
    """Restore the previous best value if the save of the current best has failed.

    Call this before a comparison and before the save of a later step. Otherwise a value without a checkpoint
    would prevent published checkpoints with worse values from becoming the best. A best value of the newest
    step is kept, because its save is made again. Raises SaveError (all ranks together).
    """
    progress, checkpoints = run.progress, run.checkpoints
    best = progress.best
    if best is None or best["step"] >= progress.finished_steps:
        return
    # No later save has begun since then, so a checkpoint published at or after that step is the best one.
    if published_step(progress, checkpoints) < best["step"]:
        # A newer claim on the directory is raised later, when all ranks agree on it: by the next save or by
        # the loop's flags.
        checkpoints.land()
    # Collective: all ranks must compare with the same value, even if some have not observed the save yet.
    if not run.membership.world.all_agree(
        published_step(progress, checkpoints) >= best["step"]
    ):
        progress.best, progress.best_before = progress.best_before, None


def _keep_best(run: TrainingComponents, values: dict[str, float]) -> None:
    progress = run.progress
    step = progress.finished_steps
    if run.best is None or step == 0:
        return
    metric, mode = run.best.metric, run.best.mode
    value = values.get(metric)
    # Wait for the save of the best checkpoint only if its outcome can change the decision.
    if not any(
        run.best.is_better(value, one) for one in (progress.best, progress.best_before)
    ):
        return
    _settle_best(run)
    if not run.best.is_better(value, progress.best):
        return

    progress.best_before = progress.best
    progress.best = {"metric": metric, "mode": mode, "value": value, "step": step}
    if progress.saved_step == step:
        # The step was saved before its evaluation, or before a stop or a lost peer interrupted it. Its
        # checkpoint is published or being written.
        run.checkpoints.mark_best(step)
        # All ranks have the same value by now. If the save has failed, it is made again.
        progress.saved_step = published_step(progress, run.checkpoints)
    _save(run, best=True)


def _save(run: TrainingComponents, *, best: bool = False, wait: bool = False) -> None:
    """Begin to save the newest step unless its save has begun; with ``wait``, wait until it is published."""
    progress = run.progress
    step = progress.finished_steps
    progress.is_save_lost = False
    if progress.saved_step == step:
        return
    if step == 0:
        return
    # Collective: the checkpoint records the best checkpoint, so settle first whether that one was published.
    _settle_best(run)
    if run.is_comparing:
        # Collective. Every rank writes a part, so replicas that differ would produce a mixed checkpoint.
        run.compare(step)
    # This save fulfils the request, so its checkpoint must not contain the request.
    asked = progress.save_asked
    progress.save_asked = -1
    tensors = run.state.tensors()
    extra = {**to_extra(run.state.values()), "tokens": step * run.tokens_per_step}
    if run.limits.keep_every is not None and run.limits.keep_every.is_due(step):
        # Record this in the checkpoint itself, so that neither a kill nor an edit of the manifest reverts it.
        extra[PERMANENT] = True
    # Also mark this checkpoint if an earlier save of the best step failed or was lost with its world.
    best = best or (progress.best is not None and progress.best["step"] == step)
    try:
        # Collectives, some of them in the checkpoint thread: each rank writes its part, rank 0 publishes.
        run.checkpoints.save(step, tensors, extra=extra, best=best, wait=wait)
    except BaseException:
        progress.save_asked = asked
        raise
    progress.saved_step = step
    progress.is_tally_unsaved = False
    run.saved_at = run.clock()


def _anchor(run: TrainingComponents) -> None:
    """Publish the newest step's checkpoint, and take the snapshots that are due after it.

    If the process is killed here, the next start either finds this checkpoint and takes the snapshots again,
    or resumes from an older checkpoint and reaches this function again. Raises SaveError or FencedError (all
    ranks together).
    """
    progress, checkpoints = run.progress, run.checkpoints
    step = progress.finished_steps

    def is_published() -> bool:
        newest = checkpoints.published
        return progress.resumed_step == step or (newest is not None and newest.step == step)

    # This loop ends, because several failed saves in a row raise an error. Pause between the attempts, as
    # training steps lie between ordinary saves: otherwise a short outage of the volume would fail all.
    pause = 0.0
    while not is_published():
        # Count the naps instead of measuring time, so that all ranks make the same pauses.
        for _ in range(round(pause / _NAP_SECONDS)):
            run.membership.world.raise_if_given_up()
            time.sleep(_NAP_SECONDS)
        save_together(run)
        pause = min(2 * pause or _FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS)
    # Collective: each rank contributes one row.
    for name, found in run.snapshots.take(step, run.membership.world).items():
        emit(run, EventType.SNAPSHOT, name=name, hash=found)


def save_together(run: TrainingComponents) -> None:
    """Save the newest step unless its checkpoint is published, and wait until it is.

    Afterwards ``progress.saved_step`` is the published step. If a checkpoint was published before an
    evaluation was interrupted, it does not contain the partial results; the step is then saved again under
    another name. Raises SaveError or FencedError (all ranks together).
    """
    progress = run.progress
    # Collective: the current save ends with the same result on all ranks.
    run.checkpoints.wait()
    progress.saved_step = published_step(progress, run.checkpoints)
    if progress.saved_step != progress.finished_steps or progress.is_tally_unsaved:
        progress.saved_step = -1
        _save(run, wait=True)
        progress.saved_step = published_step(progress, run.checkpoints)
