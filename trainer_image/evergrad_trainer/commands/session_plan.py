"""Derives a session plan from a manifest, by preflight checks and data preparation."""

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
    """A request for a session plan, read from the arguments of ``run`` or ``node``."""

    loaded: LoadedManifest
    directory: RunDirectory
    run_state: RunState
    """The state of the run in the run directory."""
    machine: Machine
    num_workers: int
    """Number of training processes on this machine."""
    stop_after_steps: int | None = None
    """Number of steps after which this process stops; None: at the end of the run."""
    world_sizes: Sequence[int] = ()
    """All numbers of workers that may train together, as from ``world_sizes_of``; empty: only
    ``num_workers``."""
    ignores_preflight: bool = False
    """Train even if the estimates of preflight predict a failure."""
    requires_prepared: bool = False
    """Refuse data that are not prepared, instead of preparing them now."""
    is_one_of_many: bool = False
    """Whether the run has nodes on other machines."""
    keep_waiting: int = 0
    """As in ``SessionPlan``."""


def plan_session(request: PlanRequest) -> "SessionPlan":
    """Check the request, prepare its data and derive the session plan.

    Raises InputError if preflight or the state of the run directory forbids the start.
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

    # Compare the model with the run directory before the preparation, which may take long.
    examination = _examine(request)
    model = examination.plan
    assert model is not None  # noqa: S101 - without a plan there is an error, which is raised
    check_model_unchanged(directory, run_state, model.describe())
    prepared, opened, task_hash, doubts = _prepare(request)
    numbers = opened.data.derive_steps(training)
    if steps_without_data(training) is None:
        # The number of steps of a horizon in epochs is known only now.
        _warn(check_cadences(training, total=numbers.total_steps))
    check_extension(directory, run_state, total_steps=numbers.total_steps)
    if not request.is_one_of_many:
        # With several nodes, the coordinator refuses a node with other data, and the run continues.
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
    """Describe the library that reads the tokenizer's directory; empty if the run has no such directory.

    Raises DataError if the tokenizer cannot be read.
    """
    from evergrad_trainer.data.tokenizers import describe_reader, load_tokenizer

    if training.tokenizer.path is None:
        return {}
    return describe_reader(load_tokenizer(training.tokenizer, base))


def _prepare(request: PlanRequest) -> "tuple[Prepared, Opened, str, tuple[str, ...]]":
    """Prepare the data and open the task; returns also the hash of its files and doubts about sources.

    The data begin at the same position as before, or at the position of the run that this run continues.
    Raises InputError if the data, the task or the recorded state cannot be used.
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
    # Find the position before the preparation, because its errors do not depend on prepared data.
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
    # Prepared data is found by its fingerprint, so that a second start reuses the data of the first.
    prepared = prepare_with_progress(
        training, base_directory=base, prepared_directory=shared, begun_with=begun_with
    )
    check_tokenizer_unchanged(request.run_state, prepared)
    # Compare again, because preparation lists each folder again and may have found a new file.
    if recorded is not None:
        check_prepared(recorded, prepared)

    # Hash the files and look for steps just before the task is opened: during hours of preparation, other
    # nodes may have trained. A node whose copy of a task fails must not end their run.
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
    # If other nodes have begun the run during the preparation, start at their position, even if the run that
    # this run continues has a newer checkpoint now.
    if (begun := _find_start(request)) is not None and begun.goes_on:
        start, other = begun, None
    opened = opened.starting_at(start if other is None else other.start, training)
    doubts = check_content(other, opened.data.train.start, prepared) if other else ()
    return prepared, opened, task_hash, doubts


def _find_position(
    request: PlanRequest,
) -> "tuple[DataStart | None, OtherRun | None]":
    """Return the recorded position at which the run's data begin, and the other run whose step defines the
    position if it is not recorded yet.

    Raises InputError if the recorded state or the other run cannot be used.
    """
    from evergrad_trainer.worker.init_from import check_load_unchanged
    from evergrad_trainer.worker.resume_position import find_other
    from evergrad_trainer.worker.setup import has_steps

    start = _find_start(request)
    # In a directory that was fresh, steps of other nodes may appear before their run.json.
    is_unknown = request.run_state.state == "fresh" and start is None
    has_begun = not is_unknown and has_steps(request.directory)
    if has_begun or (start is not None and start.goes_on):
        return start, None
    run = request.loaded.run
    if not request.is_one_of_many:
        # Check `load` first: with another `load` the data begin elsewhere, and the error would blame the
        # data. With several nodes, the coordinator compares `load`.
        check_load_unchanged(request.run_state.load, run.training.init_from)
    return start, find_other(run, request.loaded.base_directory)


def _find_start(request: PlanRequest) -> "DataStart | None":
    """Return the position at which the data of the run begin, or None if it is not recorded yet.

    Raises RunDirectoryError or VolumeError if run.json is damaged or cannot be read.
    """
    if request.run_state.state != "fresh":
        return request.run_state.start
    # Other nodes may have begun the run since this node inspected the directory.
    resolved = request.directory.read_resolved()
    return None if resolved is None else read_start(request.directory, resolved)


def _examine(request: PlanRequest) -> "Examination":
    """Run preflight: errors refuse the start, warnings are printed.

    For a fresh run, the request and the findings are recorded first, so that a start that fails in its data
    leaves both files. For a run that has begun, they are recorded only if the start is not refused, so that a
    refused start changes nothing.
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
    # The user can overrule estimates, which may be wrong, but a run without a model plan cannot train.
    errors = [
        finding.problem for finding in examination.findings if finding.level == "error"
    ]
    is_refused = bool(errors) and (
        examination.plan is None or not request.ignores_preflight
    )
    if request.run_state.state == "fresh":
        # If the directory cannot be written, this error is already among the findings.
        with contextlib.suppress(*(_UNWRITABLE if is_refused else ())):
            _record(request, examination, is_overruled=bool(errors) and not is_refused)
    shortened = _find_shortened(request)
    if is_refused:
        raise InputError(*errors, *shortened)
    # Raise this before the preparation, which may take minutes.
    raise_if(shortened, RunDirectoryError)
    _warn(examination.findings)
    return examination


def _find_shortened(request: PlanRequest) -> list[Problem]:
    """Return the problem of a horizon that is shorter than before, if its steps are known without data."""
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
    """Record the request and the findings of preflight.

    Raises RunDirectoryError or VolumeError if they cannot be written.
    """
    directory = request.directory
    directory.create()
    record_request(directory, request.loaded.run, command=sys.argv)
    findings = [(finding.level, finding.problem) for finding in examination.findings]
    record_findings(
        directory, findings, num_workers=request.num_workers, is_overruled=is_overruled
    )
