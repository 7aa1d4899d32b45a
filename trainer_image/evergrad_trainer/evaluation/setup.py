"""Opens a run from its directory: its task, its sets, and a model for the weights of checkpoints."""

import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evergrad_common.contract import PREPARED_FOLDER
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import Problem
from evergrad_manifest.files.task_files import hash_task, hash_task_files
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.base.machine import observe_machine, process_start_time
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.prepare import (
    check_prepared,
    check_unchanged,
    resolve_prepared_directory,
)
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.distributed.process_groups import choose_device, set_threads
from evergrad_trainer.distributed.world import Membership, World
from evergrad_trainer.evaluation.choice import choose_sets
from evergrad_trainer.models.compilation import should_compile
from evergrad_trainer.models.compile_cache import load_compiled
from evergrad_trainer.optim.average import AVERAGE, TRAINED, check_has_average
from evergrad_trainer.recipes.setup import Opened, open_recipe
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.record import read_base, read_key, read_run
from evergrad_trainer.run.resume import (
    RunState,
    check_tokenizer_unchanged,
    inspect_directory,
)
from evergrad_trainer.training.build import (
    Machinery,
    build_evaluations,
    build_machinery,
    threads_per_worker,
)
from evergrad_trainer.training.evaluation import EvaluationRunner
from evergrad_trainer.training.initial_model import plan_initial
from evergrad_trainer.worker.session import Session, SessionPlan
from evergrad_trainer.worker.start_state import register_state

RECORD_FORMAT: Final = 1
"""Format of ``run.json`` that this version reads."""


@dataclass(frozen=True)
class RecordedRun:
    """A typed run, as recorded in its directory."""

    directory: RunDirectory
    run: TrainingRun
    base_directory: Path
    prepared: Prepared


PrepareData = Callable[[RecordedRun, Path], Prepared]
"""Function that prepares a run's data again; its arguments are the run and the directory of prepared data."""


@dataclass(frozen=True)
class OpenedRun:
    """A run for evaluation on some of its sets, with a model whose weights are not loaded yet."""

    session: Session
    machinery: Machinery
    evaluator: EvaluationRunner
    sets: tuple[EvaluationSet, ...]


def read_recorded(path: Path) -> RecordedRun:
    """Read the record of the run in the directory ``path``, without opening its data or checkpoints.

    Raises RunDirectoryError if the directory contains no run, a script, or a run of another format.
    """
    directory = RunDirectory(path)
    directory.require_run()
    record = directory.read_resolved()
    if record is None:
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                "does not exist",
                "it contains the run's model and its evaluation sets",
                "Restore it from a backup, or wait until the run has begun",
            )
        )
    # Check the format first, because keys may have other meanings in other formats.
    if record.get("format") != RECORD_FORMAT:
        raise RunDirectoryError(
            Problem(
                str(directory.resolved),
                f"has the format {record.get('format')!r}",
                f"this version reads format {RECORD_FORMAT}",
                "Use the version of Evergrad that began this run",
            )
        )
    run = read_run(directory, record)
    if run.spec.script is not None:
        raise RunDirectoryError(
            Problem(
                str(path),
                f"contains the script {run.metadata.name}",
                "only the script knows what it measures",
                "Evaluate it with your own program, which reads what the script has saved",
            )
        )
    prepared = read_key(directory, record, "prepared", Prepared)
    base = read_base(directory, record)
    return RecordedRun(directory, run, base, prepared)


def _prepare_again(
    recorded: RecordedRun, run_state: RunState, prepare_data: PrepareData, *, shared: Path
) -> Prepared:
    """Prepare missing data again, and check that they are the data on which the run was trained."""
    run, base = recorded.run, recorded.base_directory
    check_unchanged(
        recorded.prepared, run.training, base_directory=base, prepared_directory=shared
    )
    prepared = prepare_data(recorded, shared)
    check_tokenizer_unchanged(run_state, prepared)
    # Compare again, because preparation lists each folder again and may have found a new file.
    check_prepared(recorded.prepared, prepared)
    return prepared


def open_run(
    recorded: RecordedRun,
    asked_sets: Collection[str],
    *,
    prepare_data: PrepareData,
    weights: str | None = None,
) -> OpenedRun:
    """Open a run in one process, as for training. ``asked_sets``: as in :func:`choose_sets`.

    ``weights``: ``trained`` or ``average``; None: the weights that the run itself evaluates. ``prepare_data``
    is called if the prepared data are missing. Raises the same errors as opening the run for training.
    """
    begun = time.time()
    run, base, prepared = recorded.run, recorded.base_directory, recorded.prepared
    training, path = run.training, recorded.directory.path
    if weights is None:
        is_averaged = training.ema is not None and training.ema.evaluate
        weights = AVERAGE if is_averaged else TRAINED
    # Check this before data are prepared, which may take hours.
    check_has_average(training, weights, where=str(path))
    run_state = inspect_directory(recorded.directory, run, extend=True)
    shared = path.absolute().parent / PREPARED_FOLDER
    if _is_missing(prepared):
        prepared = _prepare_again(recorded, run_state, prepare_data, shared=shared)
    is_prepared = prepared.folder is not None and prepared.folder.is_dir()
    root = resolve_prepared_directory(training, base_directory=base, default=shared)
    opened = open_recipe(
        training,
        prepared,
        base,
        has_trained=True,
        prepared_directory=None if is_prepared else root,
        run_directory=path,
    ).starting_at(run_state.start, training)

    # Choose the sets before the model is built, which may take minutes.
    sets = choose_sets(opened.data.evaluation, asked_sets)
    machine = observe_machine()
    plan = SessionPlan(
        run=run,
        config_hash=run_state.config_hash,
        base_directory=base,
        run_directory=path,
        prepared=opened.prepared or prepared,
        model=plan_initial(
            training,
            base_directory=base,
            vocab_size=prepared.vocab_size,
            run_directory=path,
        ),
        numbers=opened.data.derive_steps(training),
        threads=threads_per_worker(training, cores=machine.cores, num_workers=1),
        stop_after_steps=None,
        command=tuple(sys.argv),
        process_start=process_start_time(),
        marks={"imports": begun},
        opened=opened,
        task_hash=hash_task(training, base),
        task_files=hash_task_files(training, base),
    )
    return _build(plan, opened, sets, weights=weights)


def _build(
    plan: SessionPlan, opened: Opened, sets: tuple[EvaluationSet, ...], *, weights: str
) -> OpenedRun:
    """Build the modules as training with world size 1 does, so that results are bitwise identical."""
    # Set the threads before any operation, because their number determines the order of sums.
    set_threads(plan.threads)
    device = choose_device(plan.run.training.runtime.device, local_rank=0)
    world = World(0, rank=0, size=1, device=device)
    session = Session(
        plan,
        RunDirectory(plan.run_directory),
        lambda: False,
        Membership(world),
        opened.observers,
        opened,
    )
    # Load compiled kernels before torch compiles anything.
    if should_compile(plan.run.training.runtime, device):
        load_compiled(session.directory.compiled, device)
    # Build without weights, because each checkpoint's weights are loaded later.
    machinery = build_machinery(
        plan.run.training, opened, plan.model, world, with_weights=False, is_trained=False
    )
    # Register also values that are not tensors, so that checkpoints with other frozen weights or another
    # order are refused.
    register_state(session, machinery)
    evaluator = build_evaluations(
        machinery, code=plan.task_hash, is_averaged=weights == AVERAGE
    )
    return OpenedRun(session, machinery, evaluator, sets)


def _is_missing(prepared: Prepared) -> bool:
    """Whether a token file is missing."""
    sequences = [
        sequence
        for one in (*prepared.sources, *prepared.evaluation)
        for sequence in (one.train, one.held_out)
        if sequence is not None
    ]
    return not all(shard.path.is_file() for one in sequences for shard in one.shards)
