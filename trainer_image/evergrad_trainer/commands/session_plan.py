"""From a manifest to a session plan: preflight, preparation, and what follows from them."""

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evergrad_common.contract import PREPARED_FOLDER
from evergrad_manifest.errors import InputError, Problem, raise_if
from evergrad_manifest.reading.loader import LoadedManifest
from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.base.machine import Machine, process_start_time
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import (
    RunState,
    check_data_unchanged,
    check_extension,
    check_model_unchanged,
    check_tokenizer_unchanged,
    problems_of_extension,
    read_start,
)
from evergrad_trainer.run.start_request import record_findings, record_request

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from evergrad_manifest.training import Training
    from evergrad_trainer.data.prepared import Prepared
    from evergrad_trainer.data.start_positions import DataStart
    from evergrad_trainer.preflight.checks import Examination
    from evergrad_trainer.preflight.memory import Finding
    from evergrad_trainer.recipes.setup import Opened
    from evergrad_trainer.worker.resume_position import OtherRun
    from evergrad_trainer.worker.session import SessionPlan

_UNWRITABLE = (RunDirectoryError, VolumeError)


@dataclass(frozen=True)
class PlanRequest:
    """Request of ``run`` and ``node`` for a plan, read from their arguments."""

    loaded: LoadedManifest
    directory: RunDirectory
    run_state: RunState
    """The state that the run directory holds already."""
    machine: Machine
    num_workers: int
    """Training processes on this machine."""
    stop_after_steps: int | None = None
    """Steps of this process after which it stops; None: as many as the run has."""
    world_sizes: Sequence[int] = ()
    """Every number of workers that may train together, as ``world_sizes_of`` has them; empty: those of this
    machine alone."""
    ignores_preflight: bool = False
    """Train although preflight's estimates say that it cannot work."""
    requires_prepared: bool = False
    """Refuse data that are not prepared."""
    is_one_of_many: bool = False
    """Other nodes of the run are on machines that this one knows nothing of."""
    keep_waiting: int = 0
    """As in ``SessionPlan``."""


def plan_session(request: PlanRequest) -> "SessionPlan":
    """Check and prepare what is asked for, and derive the rest of the plan.

    Raises:
        InputError: preflight or the run directory's state forbids it.
    """
    from evergrad_manifest.derive import steps_without_data
    from evergrad_manifest.files.task_files import hash_task_files
    from evergrad_manifest.identity import config_hash
    from evergrad_trainer.preflight.checks import check_cadences
    from evergrad_trainer.training.build import threads_per_worker
    from evergrad_trainer.worker.session import SessionPlan

    loaded, directory, run_state = request.loaded, request.directory, request.run_state
    training, base = loaded.run.training, loaded.base_directory
    marks = {"imports": time.time()}

    # The content of a directory must agree with the manifest before anything is prepared for it.
    examination = _examine(request)
    model = examination.plan
    assert model is not None  # noqa: S101 - without a plan there is an error, which is raised
    check_model_unchanged(directory, run_state, model.describe())
    prepared, opened, task_hash, doubts = _prepare(request)
    numbers = opened.data.derive_steps(training)
    if steps_without_data(training) is None:
        # A horizon in epochs has its number of steps only now.
        _warn(check_cadences(training, total=numbers.total_steps))
    check_extension(directory, run_state, total_steps=numbers.total_steps)
    if not request.is_one_of_many:
        # The coordinator refuses one node with other data, and the run continues without it.
        check_data_unchanged(
            directory, run_state, fingerprint=opened.data.fingerprint, facts=opened.facts
        )
    marks["data"] = time.time()
    if run_state.state != "fresh":
        is_overruled = any(finding.level == "error" for finding in examination.findings)
        _record(request, examination, is_overruled=is_overruled)
    return SessionPlan(
        run=loaded.run,
        config_hash=run_state.config_hash or config_hash(loaded.run),
        base_directory=base,
        run_directory=directory.path,
        prepared=opened.prepared or prepared,
        model=model,
        numbers=numbers,
        threads=threads_per_worker(
            training, cores=request.machine.cores, num_workers=request.num_workers
        ),
        stop_after_steps=request.stop_after_steps,
        command=tuple(sys.argv),
        process_start=process_start_time(),
        marks=marks,
        opened=opened,
        start=opened.data.train.start,
        doubts=doubts,
        task_hash=task_hash,
        task_files=hash_task_files(training, base),
        tokenizer=_describe_tokenizer(training, base),
        keep_waiting=request.keep_waiting,
    )


def _describe_tokenizer(training: "Training", base: "Path") -> dict[str, str]:
    """The reader of the tokenizer's directory; empty if the run has none. Raises DataError."""
    from evergrad_trainer.data.tokenizers import describe_reader, load_tokenizer

    if training.tokenizer.path is None:
        return {}
    return describe_reader(load_tokenizer(training.tokenizer, base))


def _prepare(request: PlanRequest) -> "tuple[Prepared, Opened, str, tuple[str, ...]]":
    """Prepare the data and open the task on them, with the hash of its files and doubts about sources.

    The data begin where they began before, or where the run has left them whose position this one takes.
    Raises InputError.
    """
    from evergrad_manifest.files.task_files import hash_task
    from evergrad_trainer.commands.prepare import prepare_with_progress
    from evergrad_trainer.data.prepare import (
        check_prepared,
        check_published,
        check_unchanged,
        resolve_prepared_directory,
    )
    from evergrad_trainer.recipes.setup import open_recipe
    from evergrad_trainer.worker.resume_position import check_content, find_fingerprints
    from evergrad_trainer.worker.setup import has_steps

    training, base = request.loaded.run.training, request.loaded.base_directory
    # Before anything is prepared: what it refuses does not depend on that.
    start, other = _find_position(request)
    shared = request.directory.path.parent / PREPARED_FOLDER
    recorded = request.run_state.recorded
    if recorded is not None:
        check_unchanged(recorded, training, base_directory=base, prepared_directory=shared)
    begun_with = recorded.fingerprints if recorded else find_fingerprints(training, base)
    if request.requires_prepared:
        check_published(
            training, base_directory=base, prepared_directory=shared, begun_with=begun_with
        )
    # Prepared data is found by its fingerprint, so that a second start reads what the first one wrote.
    prepared = prepare_with_progress(
        training, base_directory=base, prepared_directory=shared, begun_with=begun_with
    )
    check_tokenizer_unchanged(request.run_state, prepared)
    # Each folder was expanded again: a file may have come since it was compared.
    if recorded is not None:
        check_prepared(recorded, prepared)

    # Hashed just before they are opened, and steps looked for then: preparing may have taken hours, in which
    # others have trained. A node whose copy of a task fails must not end their run.
    task_hash = hash_task(training, base)
    opened = open_recipe(
        training,
        prepared,
        base,
        has_trained=request.is_one_of_many and has_steps(request.directory),
        prepared_directory=resolve_prepared_directory(
            training, base_directory=base, default=shared
        ),
        run_directory=request.directory.path,
    )
    # Others may have begun the run while this node prepared its data: these begin where theirs do, although
    # the run that is gone on with may have a newer checkpoint since.
    if (begun := _find_start(request)) is not None and begun.goes_on:
        start, other = begun, None
    opened = opened.starting_at(start if other is None else other.start, training)
    doubts = check_content(other, opened.data.train.start, prepared) if other else ()
    return prepared, opened, task_hash, doubts


def _find_position(
    request: PlanRequest,
) -> "tuple[DataStart | None, OtherRun | None]":
    """Where the data of the run begin as it is recorded, and the run behind whose step that is where it is to
    be found yet. Raises InputError."""
    from evergrad_trainer.worker.init_from import check_load_unchanged
    from evergrad_trainer.worker.resume_position import find_other
    from evergrad_trainer.worker.setup import has_steps

    start = _find_start(request)
    # A directory that was fresh may show steps of others before it shows their record.
    is_unknown = request.run_state.state == "fresh" and start is None
    has_begun = not is_unknown and has_steps(request.directory)
    if has_begun or (start is not None and start.goes_on):
        return start, None
    run = request.loaded.run
    if not request.is_one_of_many:
        # Otherwise the data would be blamed, which begin elsewhere with another `load`. The coordinator
        # compares those of nodes.
        check_load_unchanged(request.run_state.load, run.training.init_from)
    return start, find_other(run, request.loaded.base_directory)


def _find_start(request: PlanRequest) -> "DataStart | None":
    """Where the data of the run begin, as far as that is recorded by now.

    Raises RunDirectoryError or VolumeError.
    """
    if request.run_state.state != "fresh":
        return request.run_state.start
    # Others may have begun it since this node looked at the directory.
    resolved = request.directory.read_resolved()
    return None if resolved is None else read_start(request.directory, resolved)


def _examine(request: PlanRequest) -> "Examination":
    """Run preflight before training: errors stop, warnings are printed.

    The request and the findings are recorded before anything else of a fresh run, so that a start that fails
    in its data leaves both files; of one that has begun once the start is not refused, so that a refused
    one changes nothing.
    """
    from evergrad_trainer.preflight.checks import examine

    examination = examine(
        request.loaded.run,
        base_directory=request.loaded.base_directory,
        run_directory=request.directory.path,
        machine=request.machine,
        num_workers=request.num_workers,
        world_sizes=request.world_sizes,
    )
    # An estimate may be wrong, and can be overruled; what has no plan cannot be trained.
    errors = [
        finding.problem for finding in examination.findings if finding.level == "error"
    ]
    is_refused = bool(errors) and (
        examination.plan is None or not request.ignores_preflight
    )
    if request.run_state.state == "fresh":
        # A directory that cannot be written is among the errors already, with all others.
        with contextlib.suppress(*(_UNWRITABLE if is_refused else ())):
            _record(request, examination, is_overruled=bool(errors) and not is_refused)
    shortened = _find_shortened(request)
    if is_refused:
        raise InputError(*errors, *shortened)
    # Before minutes of preparation.
    raise_if(shortened, RunDirectoryError)
    _warn(examination.findings)
    return examination


def _find_shortened(request: PlanRequest) -> list[Problem]:
    """The problem of a horizon that is shorter than the run's was, if its steps are known without data."""
    from evergrad_manifest.derive import steps_without_data

    total = steps_without_data(request.loaded.run.training)
    if total is None:
        return []
    return problems_of_extension(request.directory, request.run_state, total_steps=total)


def _warn(findings: "Iterable[Finding]") -> None:
    for finding in findings:
        if finding.level == "warning":
            print(f"warning: {finding.problem}", file=sys.stderr)


def _record(
    request: PlanRequest, examination: "Examination", *, is_overruled: bool
) -> None:
    """Write down what was asked for and what preflight found. Raises RunDirectoryError or VolumeError."""
    directory = request.directory
    directory.create()
    record_request(directory, request.loaded.run, command=sys.argv)
    findings = [(finding.level, finding.problem) for finding in examination.findings]
    record_findings(
        directory, findings, num_workers=request.num_workers, is_overruled=is_overruled
    )
