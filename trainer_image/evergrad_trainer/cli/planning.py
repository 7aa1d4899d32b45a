"""From a manifest to a session plan: preflight, preparation, and what follows from them. Shared by ``run`` and ``node``."""

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evergrad_manifest.errors import InputError
from evergrad_manifest.reading.loader import LoadedManifest
from evergrad_trainer.machine import Machine, process_start_time
from evergrad_trainer.resume import (
    Standing,
    check_extension,
    check_model_unchanged,
    check_tokenizer_unchanged,
)
from evergrad_trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from evergrad_trainer.models.build import ModelPlan
    from evergrad_trainer.worker.session import SessionPlan


@contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Before training SIGTERM ends the process as Ctrl-C does: by an exception, so that helpers and files are cleaned up."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def plan_session(
    args: argparse.Namespace,
    loaded: LoadedManifest,
    directory: RunDirectory,
    standing: Standing,
    machine: Machine,
    num_workers: int,
) -> "SessionPlan":
    """Preflight and preparation, and what follows from them."""
    from evergrad_manifest.derive import derive_steps
    from evergrad_manifest.identity import config_hash
    from evergrad_trainer.cli.prepare import prepare_with_progress
    from evergrad_trainer.data.prepare import check_unchanged
    from evergrad_trainer.recipes.opening import open_recipe
    from evergrad_trainer.training.build import threads_per_worker
    from evergrad_trainer.worker.session import SessionPlan

    training, base = loaded.run.training, loaded.base_directory
    prepared_directory = directory.path.parent / ".prepared"
    marks = {"imports": time.time()}
    model = _examine(args, loaded, directory, machine, num_workers)
    check_model_unchanged(directory, standing, model.describe())
    if standing.recorded is not None:
        check_unchanged(
            standing.recorded, training, base_directory=base, prepared_directory=prepared_directory
        )
    prepared = prepare_with_progress(training, base_directory=base, prepared_directory=prepared_directory)
    check_tokenizer_unchanged(standing, prepared)
    opened = open_recipe(training, prepared, base)
    numbers = derive_steps(training, num_samples=opened.data.train.num_samples)
    check_extension(directory, standing, total_steps=numbers.total_steps)
    marks["data"] = time.time()
    return SessionPlan(
        run=loaded.run,
        config_hash=standing.config_hash or config_hash(loaded.run),
        base_directory=base,
        run_directory=directory.path,
        prepared=prepared,
        model=model,
        numbers=numbers,
        threads=threads_per_worker(training, cores=machine.cores, num_workers=num_workers),
        stop_after_steps=getattr(args, "stop_after_steps", None),
        command=tuple(sys.argv),
        process_start=process_start_time(),
        marks=marks,
        opened=opened,
    )


def _examine(
    args: argparse.Namespace,
    loaded: LoadedManifest,
    directory: RunDirectory,
    machine: Machine,
    num_workers: int,
) -> "ModelPlan":
    """Preflight: errors stop, warnings are printed."""
    from evergrad_trainer.preflight import examine

    nodes = loaded.run.spec.nodes
    # Only a node of others' knows this machine alone; a local run's workers are all here.
    is_one_of_many = getattr(args, "join", None) is not None
    examination = examine(
        loaded.run,
        base_directory=loaded.base_directory,
        run_directory=directory.path,
        machine=machine,
        num_workers=num_workers,
        num_nodes=(nodes.min, nodes.max or nodes.min) if is_one_of_many else (1, 1),
    )
    errors = [finding.problem for finding in examination.findings if finding.level == "error"]
    if errors and (examination.plan is None or not getattr(args, "no_preflight", False)):
        raise InputError(*errors)
    for finding in examination.findings:
        if finding.level == "warning":
            print(f"warning: {finding.problem}", file=sys.stderr)
    assert examination.plan is not None  # noqa: S101 - without a plan there is an error, raised above
    return examination.plan
