"""Records of rank 0 about a start: what is trained, by which processes, from which state, and how long it
took."""

import contextlib
import dataclasses
import gc
import os
import time
from collections.abc import Mapping
from typing import Any

from evergrad_common.codec import to_camel
from evergrad_common.metrics import declare
from evergrad_manifest.derive import is_model_trained
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.identity import changed_settings, from_wire
from evergrad_manifest.model.differences import ABSENT, Change
from evergrad_trainer.base.durable import fsync_file
from evergrad_trainer.base.records import TOKENS, Event, EventType, RunInfo
from evergrad_trainer.data.start_positions import DATA_START
from evergrad_trainer.models.compilation import should_compile
from evergrad_trainer.models.compile_cache import save_compiled
from evergrad_trainer.models.determinism import describe_determinism
from evergrad_trainer.models.flops import device_peak, flops_per_token
from evergrad_trainer.optim.schedule import build_schedule
from evergrad_trainer.run.directory import reported
from evergrad_trainer.run.provenance import read_processes, record_process
from evergrad_trainer.run.record import (
    ANNOUNCED,
    BEGUN_FROM,
    FIRST_MODEL,
    Announced,
    describe_base,
    read_announced,
)
from evergrad_trainer.run.resume import resolved_record
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.worker.session import Session

_VERSIONS = ("evergrad", "torch", "transformers")
"""Packages that compute a step: another version may change the last bits of the results."""
_JUMP = 1.1
"""Smallest factor between the learning rates of two steps that counts as a jump after the schedule was
extended."""


def announce(session: Session, machinery: Machinery) -> None:
    """Record, on rank 0, what is trained, by which processes and from which state."""
    if not session.world.is_main:
        return
    plan, progress, world = session.plan, session.progress, session.world
    # Read the record before it is overwritten: changes since the last announcement are announced below.
    before = session.directory.read_resolved()
    record = _build_record(session, before or {})
    now = Announced(record["manifest"], plan.numbers.total_steps)
    known = now if before is None else read_announced(session.directory, before)
    # Keep this order: with the longer horizon already recorded, the mark would mean that this horizon is
    # reached.
    if session.directory.is_complete():
        session.directory.unmark_complete()
    pending = {} if known == now else {ANNOUNCED: dataclasses.asdict(known)}
    session.directory.write_resolved(record | pending)
    processes = read_processes(session.directory)
    entry = record_process(
        session.directory,
        run=plan.run,
        command=plan.command,
        world_size=world.size,
        generation=world.generation,
        more={
            "task": plan.task_files,
            "tokenizer": plan.tokenizer,
            "kernels": machinery.kernels,
            "determinism": describe_determinism(),
        },
    )
    # Write the start event before the events that wait for it, such as the restored checkpoint.
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
        Event(
            EventType.START, time.time(), progress.finished_steps, world.generation, start
        )
    )
    session.is_announced = True
    session.release_events()

    # Write an event for each change of the file, the task or the versions, so that the report explains the
    # curve.
    if before is not None:
        _announce_changes(session, known.manifest)
    if processes and progress.finished_steps > 0:
        _announce_versions(session, processes[-1], entry)
    if known.steps < plan.numbers.total_steps:
        _announce_extension(session, from_steps=known.steps)
    if pending:
        # Do this last: after an earlier kill, the next start announces the changes again, and a repeated
        # event is harmless. Sync the events first, so that a power failure cannot keep this record but lose
        # the events.
        if session.directory.events.exists():
            with reported(session.directory.events, what="cannot be brought to the disk"):
                fsync_file(session.directory.events)
        session.directory.write_resolved(record)


def _build_record(session: Session, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``run.json``. ``before``: its content from an earlier start."""
    plan = session.plan
    derived = {
        to_camel(key): value for key, value in dataclasses.asdict(plan.numbers).items()
    }
    record = resolved_record(
        plan.run,
        plan.prepared,
        identity=session.identity,
        base_directory=describe_base(plan.base_directory, plan.run_directory),
        derived=derived,
        # Describe the model again, so that the next start compares all keys that this transformers version
        # has.
        model=plan.model.describe(),
    )
    # Keep values derived from the model that the run began with, for example the identity of an encoder.
    first = before.get(FIRST_MODEL) or before.get("model")
    if first is not None and first != record["model"]:
        record[FIRST_MODEL] = first
    record["runId"] = session.progress.run_id
    if (start := session.data.train.start) is not None:
        record[DATA_START] = start.to_json()
    if (begun_from := session.begun_from or before.get(BEGUN_FROM)) is not None:
        record[BEGUN_FROM] = begun_from
    return record


def _announce_changes(session: Session, before: dict[str, Any]) -> None:
    """Write an event with the changes since the last start: cadences, skipped steps, overrides, and paths of
    data."""
    plan, changes = session.plan, list[Change]()
    # Another version may have written the record. If it cannot be parsed, it cannot be compared.
    with contextlib.suppress(ConfigurationError):
        changes += changed_settings(from_wire(before), plan.run)
    if not plan.run.training.files:
        # Files that the manifest contains are already among the changes of the manifest.
        changes += _changed_files(session.task_before, plan.task_files)
    if changes:
        listed = [{"path": path, "old": old, "new": new} for path, old, new in changes]
        session.emit(EventType.CHANGED, {"changes": listed})


def _changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> list[Change]:
    """Return the task's files that differ from the files with which the restored state was trained."""
    if not before:
        return []
    return [
        (f"spec.training.recipe ({name})", before.get(name, ABSENT), now.get(name, ABSENT))
        for name in sorted({**before, **now})
        if before.get(name) != now.get(name)
    ]


def _announce_versions(
    session: Session, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Warn that other versions continue the run: the steps are the same, but their last bits may differ."""
    old, new = before.get("versions") or {}, now["versions"]
    changed = [
        f"{name} {old[name]} then, {new[name]} now"
        for name in _VERSIONS
        if old.get(name) is not None and old[name] != new.get(name)
    ]
    if changed:
        message = (
            f"other versions go on with this run: {', '.join(changed)}. "
            "Its bits may differ from those of a run that kept to one version"
        )
        session.emit(EventType.WARNING, {"message": message})


def _announce_extension(session: Session, *, from_steps: int) -> None:
    """Record that the horizon grew. Warn if the learning rate jumps because the shorter schedule had already
    lowered it."""
    plan, done = session.plan, session.progress.finished_steps
    session.emit(
        EventType.EXTENDED, {"from_steps": from_steps, "to_steps": plan.numbers.total_steps}
    )
    training = plan.run.training
    before, now = (
        build_schedule(
            training.schedule,
            peak=training.optimizer.learning_rate,
            total_steps=steps,
            overrides=training.overrides,
        )
        for steps in (from_steps, plan.numbers.total_steps)
    )
    if done > 0 and now(done + 1) > _JUMP * before(done):
        message = (
            f"the learning rate rises from {before(done):.3g} at step {done} to "
            f"{now(done + 1):.3g} at the next one: "
            f"the schedule over {from_steps} steps had decayed already. "
            "To go on gently, begin a new run with initFrom and a warm-up"
        )
        session.emit(EventType.WARNING, {"message": message})


def describe_run(session: Session, machinery: Machinery) -> RunInfo:
    """Return facts for observers, before the first step that they observe."""
    plan, world = session.plan, session.world
    training, runtime = plan.run.training, plan.run.training.runtime
    # The formula is valid only for a trained language model.
    flops_of_token = flops_per_token(
        machinery.model,
        plan.model.config if is_model_trained(training) else None,
        sequence_length=training.data.sequence_length,
    )
    return RunInfo(
        name=plan.run.metadata.name,
        generation=world.generation,
        world_size=world.size,
        total_steps=plan.numbers.total_steps,
        start_step=session.progress.finished_steps,
        tokens_per_step=plan.numbers.tokens_per_step,
        samples_per_step=plan.numbers.samples_per_step,
        parameters=sum(parameter.numel() for parameter in machinery.model.parameters()),
        trainable_parameters=sum(
            parameter.numel()
            for parameter in machinery.model.parameters()
            if parameter.requires_grad
        ),
        precision=runtime.precision,
        parallelism=runtime.parallelism,
        model=plan.model.name,
        run_directory=str(plan.run_directory),
        run_id=session.progress.run_id,
        flops_per_step=None
        if flops_of_token is None
        else flops_of_token * plan.numbers.tokens_per_step,
        peak_flops=training.logging.peak_flops
        or device_peak(
            world.device,
            precision=runtime.precision,
            matmul_precision=runtime.matmul_precision,
        ),
        metrics_address=session.metrics_address,
        metrics={
            column.name: {"unit": column.unit, "help": column.help}
            for column in declare(session.opened.task.metrics)
        },
        # A user's task need not be a subclass of Task.
        loss_items=getattr(session.opened.task, "loss_items", TOKENS),
    )


def announce_first_step(session: Session) -> None:
    """Record the phases of the start-up. From here on, the garbage collector ignores the objects that it
    created."""
    if "first_step" in session.marks:
        return
    session.mark("first_step")
    previous, phases = session.plan.process_start, {}
    for phase, moment in session.marks.items():
        phases[phase] = round(moment - previous, 6)
        previous = moment
    if session.is_announced:
        session.emit(EventType.PHASES, phases)
    device = session.world.device
    if session.world.is_main and should_compile(session.plan.run.training.runtime, device):
        # Store the size, so that the first step of this process's next world does not write the same file
        # again.
        session.compiled_bytes = save_compiled(
            session.directory.compiled, device, loaded_bytes=session.compiled_bytes
        )
    if not gc.isenabled():
        gc.enable()
        gc.collect()
        gc.freeze()
