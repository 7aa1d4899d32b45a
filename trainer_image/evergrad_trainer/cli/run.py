"""``evergrad run``: the same file as on a cluster, trained on this machine."""

import argparse
import functools
import gc
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer.cli.manifest_arguments import load_from
from evergrad_trainer.cli.run_arguments import (
    add_run_arguments,
    check_arguments_of_script,
    machine_and_workers,
    run_directory_of,
)
from evergrad_trainer.config.loader import LoadedManifest
from evergrad_trainer.errors import ConfigurationError, InputError, Problem, raise_if
from evergrad_trainer.machine import Machine, process_start_time
from evergrad_trainer.resume import Standing, check_extension, inspect_directory
from evergrad_trainer.run_directory import RunDirectory

if TYPE_CHECKING:
    from evergrad_trainer.models.build import ModelPlan
    from evergrad_trainer.stages import SessionPlan

NAME = "run"
HELP = "train a TrainingRun on this machine; started again, it goes on where it stopped"
EXAMPLES = """\
  evergrad run trainingrun.yaml
  evergrad run trainingrun.yaml --workers 2
  evergrad run trainingrun.yaml --set spec.training.optimizer.learningRate=3e-4 --set metadata.name=docs-lm-2
  evergrad run trainingrun.yaml --set spec.training.horizon.tokens=40M --extend
  touch runs/docs-lm/stop        # stops it at the next step boundary, state saved, exit 75"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What decides how this process trains; what is trained stands in the manifest."""
    add_run_arguments(parser)
    parser.add_argument("--stop-after-steps", type=int, metavar="N", help="stop, state saved, after N steps of this process")
    parser.add_argument("--extend", action="store_true", help="let the manifest's horizon be longer than the run's was")
    parser.add_argument("--no-preflight", action="store_true", help="train although preflight's estimates say it cannot work")


def execute(args: argparse.Namespace) -> int:
    """Check → prepare → train; the exit code says how it ended (0, 64, 70, 75, 76)."""
    loaded = load_from(args)
    _check_arguments(args)
    if loaded.run.spec.script is not None:
        check_arguments_of_script(args)
        from evergrad_trainer.elastic.nodes import run_script  # type: ignore[import-not-found]

        return int(run_script(args, loaded))
    directory = RunDirectory(run_directory_of(args, loaded.run))
    standing = inspect_directory(directory, loaded.run, extend=args.extend)
    if standing.state == "complete":
        _say_complete(directory, loaded)
        return int(ExitCode.DONE)
    # Imports make hundreds of thousands of objects that stay: collecting among them costs a tenth of the start-up.
    gc.disable()
    # Heavy imports, only for a run that will train; before workers are forked, so that these start warm.
    from evergrad_trainer.elastic.local import launch_workers
    from evergrad_trainer.session import run_session

    machine, num_workers = machine_and_workers(args, loaded.run)
    try:
        with _sigterm_interrupts():
            plan = _plan(args, loaded, directory, standing, machine, num_workers)
    except KeyboardInterrupt:
        print("stopped before the first step: there is nothing to save, and prepared data is kept", file=sys.stderr)
        return int(ExitCode.STOPPED_SAVED)
    if num_workers == 1 or _is_launched():
        return run_session(plan)
    # A process that has touched an accelerator must not fork.
    return launch_workers(functools.partial(run_session, plan), num_workers=num_workers, use_fork=machine.num_accelerators == 0)


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    """Before training SIGTERM ends the process as Ctrl-C does: by an exception, so that helpers and files are cleaned up."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _plan(
    args: argparse.Namespace,
    loaded: LoadedManifest,
    directory: RunDirectory,
    standing: Standing,
    machine: Machine,
    num_workers: int,
) -> "SessionPlan":
    """Preflight and preparation, and what follows from them."""
    from evergrad_trainer.build import threads_per_worker
    from evergrad_trainer.cli.prepare import prepare_with_progress
    from evergrad_trainer.config.derive import derive_steps
    from evergrad_trainer.data.prepare import check_unchanged
    from evergrad_trainer.data.tokenizers import load_tokenizer
    from evergrad_trainer.recipes import RECIPES
    from evergrad_trainer.stages import SessionPlan

    training, base = loaded.run.training, loaded.base_directory
    prepared_directory = directory.path.parent / ".prepared"
    marks = {"imports": time.time()}
    model = _examine(args, loaded, directory, machine, num_workers)
    if standing.recorded is not None:
        check_unchanged(standing.recorded, training, base_directory=base, prepared_directory=prepared_directory)
    prepared = prepare_with_progress(training, base_directory=base, prepared_directory=prepared_directory)
    data = RECIPES[training.recipe].open_data(training, prepared, load_tokenizer(training.tokenizer, base))
    numbers = derive_steps(training, num_samples=data.train.num_samples)
    check_extension(directory, standing, total_steps=numbers.total_steps)
    marks["data"] = time.time()
    return SessionPlan(
        run=loaded.run,
        base_directory=base,
        run_directory=directory.path,
        prepared=prepared,
        model=model,
        numbers=numbers,
        threads=threads_per_worker(training, cores=machine.cores, num_workers=num_workers),
        stop_after_steps=args.stop_after_steps,
        command=tuple(sys.argv),
        process_start=process_start_time(),
        marks=marks,
    )


def _examine(
    args: argparse.Namespace, loaded: LoadedManifest, directory: RunDirectory, machine: Machine, num_workers: int
) -> "ModelPlan":
    """Preflight: errors stop, warnings are printed."""
    from evergrad_trainer.preflight import examine

    examination = examine(
        loaded.run, base_directory=loaded.base_directory, run_directory=directory.path, machine=machine, num_workers=num_workers
    )
    errors = [finding.problem for finding in examination.findings if finding.level == "error"]
    if errors and (examination.plan is None or not args.no_preflight):
        raise InputError(*errors)
    for finding in examination.findings:
        if finding.level == "warning":
            print(f"warning: {finding.problem}", file=sys.stderr)
    assert examination.plan is not None  # noqa: S101 - without a plan there is an error, raised above
    return examination.plan


def _check_arguments(args: argparse.Namespace) -> None:
    problems = [
        Problem(f"--{name}", f"{value} is below 1", "", "Give a positive number")
        for name, value in (("workers", args.workers), ("stop-after-steps", args.stop_after_steps))
        if value is not None and value < 1
    ]
    raise_if(problems, ConfigurationError)


def _is_launched() -> bool:
    """Whether torchrun or our own launcher has already started this process as one of several."""
    from evergrad_trainer.distributed import read_launch

    return read_launch().world_size > 1


def _say_complete(directory: RunDirectory, loaded: LoadedManifest) -> None:
    facts = directory.read_complete() or {}
    name, step = loaded.run.metadata.name, facts.get("step")
    print(f"{name} is complete: {step} steps, in {directory.path}. Nothing to do.")
    print("To train longer, raise the horizon and use --extend.")
