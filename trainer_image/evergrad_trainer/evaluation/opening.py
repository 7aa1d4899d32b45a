"""Opens a run from its directory alone: its task, its sets, and a model to load checkpoints into."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.derive import derive_steps
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.task_files import hash_task, hash_task_files
from evergrad_trainer.data.prepare import resolve_prepared_directory
from evergrad_trainer.data.prepared import Prepared, sequence_problems
from evergrad_trainer.distributed import choose_device, set_threads
from evergrad_trainer.errors import RunDirectoryError
from evergrad_trainer.machine import observe_machine, process_start_time
from evergrad_trainer.models.build import plan_model
from evergrad_trainer.recipes.opening import open_recipe
from evergrad_trainer.resume import check_tokenizer_unchanged, inspect_directory, read_run
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.training.build import (
    Machinery,
    build_evaluations,
    build_machinery,
    threads_per_worker,
)
from evergrad_trainer.training.evaluation import EvaluationRunner
from evergrad_trainer.worker.restoring import register_state
from evergrad_trainer.worker.session import Session, SessionPlan
from evergrad_trainer.world import Membership, World

RECORD_FORMAT: Final = 1
"""Format of ``run.json`` that this version reads."""

PrepareData = Callable[[TrainingRun, Path, Path], Prepared]
"""Prepares a run's data: the run, where its relative paths begin, and where prepared data lie."""


@dataclass(frozen=True)
class OpenedRun:
    """A run to be evaluated, with a model that has no weights of its own yet."""

    session: Session
    machinery: Machinery
    evaluator: EvaluationRunner


def open_run(path: Path, *, prepare_data: PrepareData) -> OpenedRun:
    """Open the run in the directory ``path`` in one process, as the trainer opens it.

    ``prepare_data`` is called where the prepared data are gone. Raises RunDirectoryError for a directory that
    holds no typed run of this version's format, and as opening the run for training does.
    """
    directory = RunDirectory(path)
    record = read_run_record(directory)
    run = read_run(directory, record)
    if run.spec.script is not None:
        raise RunDirectoryError(
            Problem(
                str(path),
                f"holds the script {run.metadata.name}",
                "what a script measures is known to the script alone",
                "Evaluate it with a program of your own, which reads what the script has saved",
            )
        )
    begun = time.time()
    training, base = run.training, path / record["baseDirectory"]
    run_state = inspect_directory(directory, run, extend=True)
    prepared = Prepared.from_json(record["prepared"])
    shared = path.absolute().parent / ".prepared"
    if _is_missing(prepared):
        prepared = prepare_data(run, base, shared)
        check_tokenizer_unchanged(run_state, prepared)

    root = resolve_prepared_directory(training, base_directory=base, default=shared)
    is_prepared = prepared.folder is not None and prepared.folder.is_dir()
    opened = open_recipe(
        training,
        prepared,
        base,
        has_trained=True,
        prepared_directory=None if is_prepared else root,
    )
    machine = observe_machine(num_accelerators=0, accelerator_memory_bytes=None)
    plan = SessionPlan(
        run=run,
        config_hash=run_state.config_hash,
        base_directory=base,
        run_directory=path,
        prepared=opened.prepared or prepared,
        model=plan_model(training.model, base_directory=base, vocab_size=prepared.vocab_size),
        numbers=derive_steps(training, num_samples=opened.data.train.num_samples),
        threads=threads_per_worker(training, cores=machine.cores, num_workers=1),
        stop_after_steps=None,
        command=tuple(sys.argv),
        process_start=process_start_time(),
        marks={"imports": begun},
        opened=opened,
        task_hash=hash_task(training, base),
        task_files=hash_task_files(training, base),
    )
    return _build(plan, directory)


def _build(plan: SessionPlan, directory: RunDirectory) -> OpenedRun:
    """Make the modules as training in a world of one makes them, so that they give the same bits."""
    opened = plan.opened
    assert opened is not None  # noqa: S101 - the plan was made with it
    set_threads(plan.threads)
    device = choose_device(plan.run.training.runtime.device, local_rank=0)
    world = World(0, rank=0, size=1, device=device)
    session = Session(
        plan, directory, lambda: False, Membership(world), opened.observers, opened
    )
    machinery = build_machinery(
        plan.run.training, opened, plan.model, world, with_weights=False, is_trained=False
    )
    register_state(session, machinery)
    return OpenedRun(session, machinery, build_evaluations(machinery, code=plan.task_hash))


def read_run_record(directory: RunDirectory) -> dict[str, Any]:
    """The content of ``run.json``. Raises RunDirectoryError for what is no run, or one of another format."""
    directory.require_run()
    record = directory.read_resolved()
    if record is None:
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                "does not exist",
                "the run's model and its evaluation sets stand in it",
                "Restore it from a backup, or wait until the run has begun",
            )
        )
    if record.get("format") != RECORD_FORMAT:
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                f"has the format {record.get('format')!r}",
                f"this version reads format {RECORD_FORMAT}",
                "Use the version of Evergrad that began this run",
            )
        )
    return record


def _is_missing(prepared: Prepared) -> bool:
    """Whether a prepared file is not there as it was recorded."""
    sources = (*prepared.sources, *prepared.evaluation)
    return any(sequence_problems(one.path.parent, one.train, one.held_out) for one in sources)
