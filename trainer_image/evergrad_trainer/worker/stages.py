"""The stages that every training process goes through, in whatever order its kind of session needs them."""

import dataclasses
import gc
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evergrad_coordinator.contract import ErrorKind, ExitCode
from evergrad_manifest.derive import HorizonNumbers
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import EvergradError, InputError, Problem, raise_if
from evergrad_manifest.identity import config_hash
from evergrad_trainer.checkpoint.manager import CheckpointManager, Identity
from evergrad_trainer.checkpoint.weights import load_weights
from evergrad_trainer.data.build import Data
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.tokenizers import load_tokenizer
from evergrad_trainer.distributed import read_launch
from evergrad_trainer.errors import CheckpointError, FencedError, SaveError
from evergrad_trainer.host_trouble import describe_host_trouble
from evergrad_trainer.models.build import ModelPlan
from evergrad_trainer.models.weights import load_model_directory
from evergrad_trainer.observers.base import Observer
from evergrad_trainer.optim.adamw import set_updates
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.provenance.record import record_process
from evergrad_trainer.recipes import RECIPES
from evergrad_trainer.records import Event, EventType, RunInfo, StopReason
from evergrad_trainer.resume import compare_models, resolved_record
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.training.build import (
    Machinery,
    build_best,
    build_comparison,
    build_evaluator,
    build_limits,
    build_stepper,
)
from evergrad_trainer.training.loop import Progress, Run
from evergrad_trainer.worker.channel import MAX_TEXT, Failed
from evergrad_trainer.worker.lost_peers import LOST_WORDS, is_lost_peer
from evergrad_trainer.world import Membership, World

_log = logging.getLogger(__name__)
_JUMP = 1.1
"""A rise of the learning rate from one step to the next that a longer schedule alone does not explain."""
AGREED = (FencedError, CheckpointError, SaveError)
"""Errors that all ranks raise together, so that rank 0 speaks for them."""


@dataclass(frozen=True)
class SessionPlan:
    """Everything decided before the first process group exists. ``marks``: Unix seconds at the end of each start-up phase."""

    run: TrainingRun
    base_directory: Path
    run_directory: Path
    prepared: Prepared
    model: ModelPlan
    numbers: HorizonNumbers
    threads: int
    stop_after_steps: int | None
    command: tuple[str, ...]
    process_start: float
    marks: dict[str, float]


@dataclass
class Session:
    """What the stages of one process hand to each other."""

    plan: SessionPlan
    directory: RunDirectory
    is_signalled: Callable[[], bool]
    membership: Membership
    observers: Observer
    data: Data
    progress: Progress = field(default_factory=Progress)
    marks: dict[str, float] = field(default_factory=dict)
    metrics_address: str | None = None
    waiting: list[Event] | None = field(default_factory=list)
    """Events before the start event, which comes first; None once it is written."""
    is_announced: bool = False
    """This process has written a start event."""

    @property
    def world(self) -> World:
        return self.membership.world

    def mark(self, phase: str) -> None:
        self.marks[phase] = time.time()

    def emit(self, type_: str, fields: dict[str, Any]) -> None:
        """Tell the observers of a transition at the last finished step."""
        step, generation = self.progress.finished_steps, self.world.generation
        event = Event(type=type_, time=time.time(), step=step, generation=generation, fields=fields)
        if self.waiting is not None:
            self.waiting.append(event)
        else:
            self.observers.event(event)

    def release_events(self) -> None:
        """Write what has waited for the start event; from here on events are written as they come."""
        waiting, self.waiting = self.waiting or [], None
        for event in waiting:
            # Dated now: in a log whose lines go back in time, the clock would seem to have been set.
            self.observers.event(
                dataclasses.replace(event, step=self.progress.finished_steps, time=time.time())
            )


def open_data(plan: SessionPlan) -> Data:
    """The run's prepared data, in the order of its recipe."""
    training = plan.run.training
    return RECIPES[training.recipe].open_data(
        training, plan.prepared, load_tokenizer(training.tokenizer, plan.base_directory)
    )


def build_checkpoints(session: Session) -> CheckpointManager:
    """What saves and restores this session's state."""
    plan = session.plan
    return CheckpointManager(
        session.directory.checkpoints,
        membership=session.membership,
        settings=plan.run.training.checkpoint,
        identity=Identity(plan.run.metadata.name, config_hash(plan.run), session.data.fingerprint),
        on_event=session.emit,
    )


def has_checkpoints(directory: RunDirectory) -> bool:
    return any(directory.checkpoints.glob("step-*"))


def restore(
    session: Session,
    machinery: Machinery,
    checkpoints: CheckpointManager,
    *,
    has_checkpoints: bool,
    rebuild: Callable[[], None] | None = None,
) -> None:
    """Load the newest checkpoint, or the weights a fresh run begins with.

    ``rebuild`` gives the tensors their initial values where no checkpoint is loaded; None where they have them already.
    """
    init_from = session.plan.run.training.init_from
    restored = checkpoints.restore(machinery.state())
    if restored is None and not has_checkpoints and rebuild is not None:
        rebuild()
    if restored is not None:
        extra = restored.extra
        progress = session.progress
        progress.finished_steps = progress.saved_step = progress.resumed_step = int(extra["step"])
        progress.remember(extra)
        set_updates(machinery.optimizer, progress.updates)
        _check_cursor(session, extra)
        _check_model(session, extra)
    elif has_checkpoints:
        raise CheckpointError(
            Problem(
                str(session.directory.checkpoints),
                "checkpoints were there at the start and are gone",
                "",
                "Start again",
            )
        )
    elif init_from is not None:
        path = session.plan.base_directory / init_from.path
        if (path / "config.json").is_file():
            load_model_directory(path, machinery.state(), config=session.plan.model.config)
        else:
            load_weights(path, machinery.state(), world=session.world)


def _check_cursor(session: Session, extra: dict[str, Any]) -> None:
    """The cursor is a pure function of the step; a checkpoint that disagrees was written with another order."""
    expected = session.data.train.cursor(session.progress.finished_steps)
    if extra["cursor"] != expected:
        raise CheckpointError(
            Problem(
                str(session.directory.checkpoints),
                f"the checkpoint's cursor is {extra['cursor']} and this version's is {expected}",
                "the sample order is not the one the run began with",
                "Go on with the version of Evergrad that began this run",
            )
        )


def _check_model(session: Session, extra: dict[str, Any]) -> None:
    """The checkpoint's tensors may fit a model that computes something else with them. Older checkpoints do not say."""
    if "model" in extra:
        where = str(session.directory.checkpoints)
        raise_if(compare_models(extra["model"], session.plan.model.describe(), where=where), CheckpointError)


def announce(session: Session, machinery: Machinery) -> None:
    """Rank 0 records who trains what, from where."""
    if not session.world.is_main:
        return
    plan, progress, world = session.plan, session.progress, session.world
    derived = {_camel(key): value for key, value in dataclasses.asdict(plan.numbers).items()}
    base = os.path.relpath(plan.base_directory, plan.run_directory)
    record = resolved_record(
        plan.run,
        plan.prepared,
        base_directory=base,
        derived=derived,
        data_fingerprint=session.data.fingerprint,
        model=plan.model.describe(),
    )
    before = session.directory.read_resolved()
    session.directory.write_resolved(record)
    if session.directory.is_complete():
        session.directory.unmark_complete()
    record_process(
        session.directory,
        run=plan.run,
        command=plan.command,
        world_size=world.size,
        generation=world.generation,
    )
    session.observers.run_start(describe_run(session, machinery))
    start = {
        "run": plan.run.metadata.name,
        "process_start_time": plan.process_start,
        "resumed_from": progress.finished_steps or None,
        "total_steps": plan.numbers.total_steps,
        "world_size": world.size,
        "pid": os.getpid(),
    }
    session.observers.event(
        Event(EventType.START, time.time(), progress.finished_steps, world.generation, start)
    )
    session.is_announced = True
    session.release_events()
    if before is not None and before["derived"]["totalSteps"] < plan.numbers.total_steps:
        _announce_extension(session, from_steps=int(before["derived"]["totalSteps"]))


def _announce_extension(session: Session, *, from_steps: int) -> None:
    """Say that the horizon grew, and that the learning rate jumps where the shorter schedule had lowered it already."""
    plan, done = session.plan, session.progress.finished_steps
    session.emit(EventType.EXTENDED, {"from_steps": from_steps, "to_steps": plan.numbers.total_steps})
    training = plan.run.training
    before, now = (
        build_schedule(training.schedule, peak=training.optimizer.learning_rate, total_steps=steps)
        for steps in (from_steps, plan.numbers.total_steps)
    )
    if done > 0 and now(done + 1) > _JUMP * before(done):
        message = (
            f"the learning rate rises from {before(done):.3g} at step {done} to {now(done + 1):.3g} at the next one: "
            f"the schedule over {from_steps} steps had decayed already. "
            "To go on gently, begin a new run with initFrom and a warm-up"
        )
        session.emit(EventType.WARNING, {"message": message})


def describe_run(session: Session, machinery: Machinery) -> RunInfo:
    """What observers know before the first step they see."""
    plan, world = session.plan, session.world
    runtime = plan.run.training.runtime
    return RunInfo(
        name=plan.run.metadata.name,
        generation=world.generation,
        world_size=world.size,
        total_steps=plan.numbers.total_steps,
        start_step=session.progress.finished_steps,
        tokens_per_step=plan.numbers.tokens_per_step,
        samples_per_step=plan.numbers.samples_per_step,
        parameters=sum(parameter.numel() for parameter in machinery.model.parameters()),
        precision=runtime.precision,
        parallelism=runtime.parallelism,
        model=plan.model.name,
        run_directory=str(plan.run_directory),
        metrics_address=session.metrics_address,
    )


def build_run(session: Session, machinery: Machinery, checkpoints: CheckpointManager) -> Run:
    training, numbers = session.plan.run.training, session.plan.numbers
    return Run(
        limits=build_limits(
            training, total_steps=numbers.total_steps, stop_after_steps=session.plan.stop_after_steps
        ),
        membership=session.membership,
        stepper=build_stepper(training, machinery, session.data.train, total_steps=numbers.total_steps),
        stream=session.data.train,
        checkpoints=checkpoints,
        state=machinery.state,
        evaluator=build_evaluator(training, machinery),
        evaluation_sets=session.data.evaluation,
        best=build_best(training),
        observers=session.observers,
        directory=session.directory,
        tokens_per_step=numbers.tokens_per_step,
        is_signalled=session.is_signalled,
        compare=build_comparison(machinery, session.membership),
        on_first_step=lambda: _after_first_step(session),
        model=session.plan.model.describe(),
        progress=session.progress,
    )


def _after_first_step(session: Session) -> None:
    """Say what the start-up consisted of; from here on the garbage collector need not look at what start-up made."""
    if "first_step" in session.marks:
        return
    session.mark("first_step")
    previous, phases = session.plan.process_start, {}
    for phase, moment in session.marks.items():
        phases[phase] = round(moment - previous, 6)
        previous = moment
    if session.is_announced:
        session.emit(EventType.PHASES, phases)
    if not gc.isenabled():
        gc.enable()
        gc.collect()
        gc.freeze()


def finish(session: Session, reason: StopReason, *, is_saved: bool) -> ExitCode:
    """Mark a complete run, write the report, close the observers."""
    code = ExitCode.DONE if reason == "complete" else ExitCode.STOPPED_SAVED
    if not is_saved:
        code = ExitCode.INTERNAL if reason == "complete" else ExitCode.STOPPED_UNSAVED
    if not session.world.is_main:
        return code
    if code == ExitCode.DONE:
        step = session.progress.finished_steps
        session.emit(EventType.COMPLETE, {"total_steps": step})
        session.directory.mark_complete(
            {
                "run": session.plan.run.metadata.name,
                "step": step,
                "time": time.time(),
                "best": session.progress.best,
            }
        )
    session.emit(EventType.END, {"exit_code": int(code)})
    session.observers.close()
    if reason == "non_finite":
        print(f"error: {session.progress.refusal}", file=sys.stderr)
    if reason == "signal":
        # Whoever asked to stop may kill next: the state is saved, and a report can be made at any time.
        print(f"stopped; for a report: evergrad report {session.directory.path}", flush=True)
    else:
        _write_report(session)
    if not is_saved:
        print(
            "error: the state of the last steps could not be saved; the newest checkpoint is older",
            file=sys.stderr,
        )
    return code


def _write_report(session: Session) -> None:
    from evergrad_trainer.report.build import write_report

    try:
        paths = write_report(session.directory.path)
        print(f"report: {paths.html}", flush=True)
    except Exception as error:  # noqa: BLE001 - the training is done and saved; a report can be made again at any time
        _log.exception("the report could not be written")
        print(
            f"warning: the report could not be written: {error}. Try: evergrad report {session.directory.path}",
            file=sys.stderr,
        )


def report_failure(session: Session | None, error: Exception, *, rank: int) -> ExitCode:
    """Report an error once: in the events, the log and on stderr. Wrong input has no traceback."""
    code = error.exit_code if isinstance(error, EvergradError) else ExitCode.INTERNAL
    # For the file alone: the terminal gets its own, shorter words below.
    _log.info(
        "failed with %s: %s",
        type(error).__name__,
        error,
        exc_info=None if isinstance(error, InputError) else error,
    )
    if session is not None:
        _close_quietly(session, error, code)
    if isinstance(error, AGREED) and rank != 0:
        return code
    where = f"rank {rank}: " if rank else ""
    if isinstance(error, InputError):
        for problem in error.problems:
            print(f"error: {where}{problem}", file=sys.stderr)
    elif isinstance(error, EvergradError):
        print(f"error: {where}{error}", file=sys.stderr)
    elif is_lost_peer(f"{type(error).__name__}: {error}", world_size=read_launch().world_size):
        # A consequence, whose cause another rank tells.
        print(f"error: rank {rank}: {LOST_WORDS}", file=sys.stderr)
    else:
        print(f"error: rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        traceback.print_exception(error)
    return code


def build_last_words(
    session: Session | None, error: Exception, code: ExitCode, *, generation: int, is_agreed: bool
) -> Failed:
    """What a worker tells its node of the error that ends it. ``is_agreed``: all ranks raise it, and the same process goes on."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    kind = error.kind if isinstance(error, EvergradError) else ErrorKind.INTERNAL
    if describe_host_trouble(error) is not None:
        kind = ErrorKind.ENVIRONMENT
    return Failed(
        generation,
        step=session.progress.finished_steps if session is not None else -1,
        exit_code=int(code),
        error=type(error).__name__,
        text=f"{error}\n{notes}".strip()[:MAX_TEXT],
        is_final=isinstance(error, InputError),
        is_agreed=is_agreed,
        kind=kind.value,
    )


def _close_quietly(session: Session, error: Exception, code: ExitCode) -> None:
    """The last events of a failing process; a second failure here must not hide the first."""
    calls: list[Callable[[], None]] = [
        session.release_events,
        lambda: session.emit(
            EventType.FAILED,
            {"error": type(error).__name__, "message": str(error)[:4000], "exit_code": int(code)},
        ),
        lambda: session.emit(EventType.END, {"exit_code": int(code)}),
        session.observers.close,
    ]
    for call in calls:
        try:
            call()
        except Exception:  # noqa: BLE001 - the first error is the one that counts
            _log.exception("while closing after an error")


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.title() for part in rest)
