"""``evergrad run``: trains on this machine with the same manifest as on a cluster."""

import argparse
import contextlib
import dataclasses
import gc
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from evergrad_common.contract import ExitCode
from evergrad_coordinator.edge.stacks import register_stacks
from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.reading.loader import LoadedManifest, load_from
from evergrad_trainer.base.machine import (
    Machine,
    has_accelerator_driver,
    usable_memory_bytes,
)
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.read_ahead import read_ahead
from evergrad_trainer.commands.pod import sigterm_interrupts
from evergrad_trainer.commands.run_arguments import (
    add_run_arguments,
    delay_compiler,
    machine_and_workers,
    run_directory_of,
    world_sizes_of,
)
from evergrad_trainer.commands.session_plan import PlanRequest, plan_session
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.owner import (
    TAKE_OVER,
    own_run_directory,
    refuse_second_run,
    take_over,
)
from evergrad_trainer.run.resume import RunState, inspect_directory

NAME = "run"
EXAMPLES = """\
  evergrad run trainingrun.yaml
  evergrad run trainingrun.yaml --workers 2
  evergrad run trainingrun.yaml --nodes 3            # elastic: nodes can join, leave and fail
  evergrad run trainingrun.yaml --nodes 3 --chaos 7  # demonstration: random kills and freezes
  evergrad run trainingrun.yaml --set spec.training.optimizer.learningRate=3e-4 --set metadata.name=docs-lm-2
  evergrad run trainingrun.yaml --set spec.training.horizon.tokens=40M --extend
  evergrad run trainingrun.yaml --take-over          # stop the process that trains this run, then continue
  touch runs/docs-lm/stop        # save and stop at the next step boundary, exit 75"""

_SAVE_SECONDS = 300.0
"""Time for a process that is taken over to finish its step and to save a large model."""


@dataclass(frozen=True)
class RunRequest:
    """The checked arguments of ``evergrad run``."""

    loaded: LoadedManifest
    directory: Path
    """The run directory."""
    num_workers: int | None = None
    """Number of training processes per node; None: the number in the manifest."""
    num_nodes: int | None = None
    """Number of nodes on this machine; None: one node that other nodes cannot join."""
    chaos_seed: int | None = None
    """Seed for killing and freezing processes at random; None: no processes are killed or frozen."""
    stop_after_steps: int | None = None
    is_extension: bool = False
    """Whether the manifest's horizon may be longer than the run's previous horizon."""
    ignores_preflight: bool = False
    requires_prepared: bool = False
    """Whether data that are not prepared are refused instead of prepared now."""
    takes_over: bool = False
    """Whether to end a process of this machine that trains this run, instead of refusing to start."""


@dataclass(frozen=True)
class WorkerPlacement:
    """Where the workers of a typed run on this machine run."""

    machine: Machine
    num_workers: int
    """Number of training processes per node."""
    is_launched: bool
    """Whether torchrun has started this process as one of several."""
    is_in_this_process: bool
    """Whether this process trains itself, instead of starting nodes with workers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments that control how this process trains; the manifest defines the training itself."""
    add_run_arguments(parser)
    parser.add_argument(
        "--nodes",
        type=int,
        metavar="N",
        help="run N elastic nodes, all of them on this machine",
    )
    parser.add_argument(
        "--chaos",
        type=int,
        metavar="SEED",
        help="with --nodes: kill and freeze processes at random (package evergrad-chaos)",
    )
    parser.add_argument(
        "--stop-after-steps",
        type=int,
        metavar="N",
        help="save and stop after N steps of this process",
    )
    parser.add_argument(
        "--extend",
        action="store_true",
        help="allow a longer horizon than at the previous start",
    )
    parser.add_argument(
        "--no-preflight",
        action="store_true",
        help="train even if the estimates of preflight predict a failure",
    )
    parser.add_argument(
        "--require-prepared",
        action="store_true",
        help="refuse sources that `evergrad prepare` has not prepared, for example on expensive machines",
    )
    parser.add_argument(
        TAKE_OVER,
        action="store_true",
        help="if a process of this machine trains this run, let it save and stop first; without this option "
        "the command is refused",
    )


def execute(args: argparse.Namespace) -> int:
    """Check, prepare and train; returns the exit code of the run (0, 64, 70, 75 or 76)."""
    register_stacks()
    request = _read_request(args)
    run, directory = request.loaded.run, RunDirectory(request.directory)
    _check_alone(request, directory)
    if run.spec.script is not None:
        from evergrad_trainer.commands.nodes import run_script

        return run_script(
            request.loaded,
            directory,
            num_nodes=request.num_nodes or 1,
            asked_workers=request.num_workers,
        )
    run_state = inspect_directory(
        directory,
        run,
        extend=request.is_extension,
        base_directory=request.loaded.base_directory,
    )
    if run_state.state == "complete":
        step, name = (directory.read_complete() or {}).get("step"), run.metadata.name
        print(f"{name} is complete: {step} steps, in {directory.path}. Nothing to do.")
        print("To train longer, raise the horizon and use --extend.")
        return int(ExitCode.DONE)
    return _train(request, directory, run_state)


def _check_alone(request: RunRequest, directory: RunDirectory) -> None:
    """Ensure that no other process of this machine trains this run: take it over, or raise RunDirectoryError.

    Called before the directory is read, because the state of a run that is taken over is final only after
    its process has ended.
    """
    # Of the processes that torchrun starts, only rank 0 does this.
    if not _is_rank_0():
        return
    if request.takes_over:
        script = request.loaded.run.spec.script
        grace_seconds = float(script.grace_period_seconds) if script is not None else 0.0
        take_over(directory, grace_seconds=grace_seconds + _SAVE_SECONDS)
    elif not directory.is_complete():
        refuse_second_run(directory)


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _train(request: RunRequest, directory: RunDirectory, run_state: RunState) -> int:
    """Plan a typed run that is not complete, and train it in this process or on nodes of this machine."""
    # Measure the memory before the read-ahead, whose buffers preflight would otherwise count as used memory.
    memory_bytes = usable_memory_bytes()
    ahead: HeldFiles | None = None
    if _restores_here(request):
        # Read the checkpoint from the disk while this process imports torch.
        ahead = read_ahead(directory.checkpoints, memory_bytes=memory_bytes)

    # Imports create objects that are never freed. Garbage collection would take a tenth of the start-up time.
    gc.disable()
    placement = _place_workers(request, memory_bytes)
    # Import heavy modules only for a run that will train, and before workers are forked, so that the workers
    # inherit the loaded modules.
    from evergrad_trainer.worker.run import run_session

    try:
        with sigterm_interrupts():
            plan = plan_session(_plan_request(request, directory, run_state, placement))
    except KeyboardInterrupt:
        what = "there is nothing to save, and prepared data is kept"
        print(f"stopped before the first step: {what}", file=sys.stderr)
        return int(ExitCode.STOPPED_SAVED)

    # Own the directory only now, so that a command that is refused before its first step writes nothing.
    with own_run_directory(directory) if _is_rank_0() else contextlib.nullcontext():
        if placement.is_in_this_process:
            if not placement.is_launched:
                # Without a coordinator there is no live page; `evergrad open` builds the page from the files.
                print(f"page: evergrad open {shlex.quote(str(directory.path))}", flush=True)
            return run_session(dataclasses.replace(plan, ahead=ahead))
        # Several processes are members of one elastic run, on one node or on many.
        from evergrad_trainer.commands.nodes import run_nodes

        return run_nodes(
            plan,
            num_nodes=request.num_nodes,
            chaos_seed=request.chaos_seed,
            num_workers=placement.num_workers,
            num_accelerators=placement.machine.num_accelerators,
        )


def _place_workers(request: RunRequest, memory_bytes: int | None) -> WorkerPlacement:
    """Decide where the workers run. Imports torch, without its compiler if no worker needs the compiler."""
    from evergrad_trainer.distributed.process_groups import read_launch

    run = request.loaded.run
    is_launched = read_launch().world_size > 1
    forks_above = None if is_launched else 1 if request.num_nodes is None else 0
    machine, num_workers = machine_and_workers(
        request.num_workers, run, forks_above=forks_above
    )
    is_alone = request.num_nodes is None and (num_workers == 1 or is_launched)
    machine = dataclasses.replace(machine, memory_bytes=memory_bytes)
    delay_compiler(run, machine, forks=not is_alone)
    return WorkerPlacement(machine, num_workers, is_launched, is_alone)


def _plan_request(
    request: RunRequest,
    directory: RunDirectory,
    run_state: RunState,
    placement: WorkerPlacement,
) -> PlanRequest:
    num_workers, num_nodes = placement.num_workers, request.num_nodes or 1
    return PlanRequest(
        request.loaded,
        directory,
        run_state,
        placement.machine,
        num_workers * num_nodes,
        world_sizes=world_sizes_of(
            request.loaded.run, num_workers=num_workers, num_nodes=num_nodes
        ),
        stop_after_steps=request.stop_after_steps,
        ignores_preflight=request.ignores_preflight,
        requires_prepared=request.requires_prepared,
    )


def _read_request(args: argparse.Namespace) -> RunRequest:
    """Check the arguments and convert them to a request.

    Raises ConfigurationError if an argument is invalid, and the errors of ``load_from``.
    """
    loaded = load_from(args)
    # Collect all problems, so that the user can correct them in one try.
    problems = [
        Problem(f"--{name}", f"{value} is below 1", "", "Give a positive number")
        for name, value in (
            ("nodes", args.nodes),
            ("workers", args.workers),
            ("stop-after-steps", args.stop_after_steps),
        )
        if value is not None and value < 1
    ]
    if args.chaos is not None and args.nodes is None:
        problems.append(
            Problem(
                "--chaos",
                "needs several nodes",
                "if a node is lost, another node must continue",
                "Add --nodes 3",
            )
        )
    raise_if(problems, ConfigurationError)
    if args.chaos is not None:
        from evergrad_trainer.commands.chaos import load_chaos

        load_chaos()
    request = RunRequest(
        loaded,
        directory=run_directory_of(args.run_directory, loaded.run),
        num_workers=args.workers,
        num_nodes=args.nodes,
        chaos_seed=args.chaos,
        stop_after_steps=args.stop_after_steps,
        is_extension=args.extend,
        ignores_preflight=args.no_preflight,
        requires_prepared=args.require_prepared,
        takes_over=args.take_over,
    )
    if loaded.run.spec.script is not None:
        check_request_of_script(request)
    return request


def check_request_of_script(request: RunRequest) -> None:
    """Raise ConfigurationError if the request of a script has options that only a typed run supports."""
    why = "only the script controls its steps"
    problems = [
        Problem(
            option,
            "has no meaning for spec.script",
            why,
            "Leave it out, or give the script its own argument",
        )
        for option, is_given in (
            ("--stop-after-steps", request.stop_after_steps is not None),
            ("--extend", request.is_extension),
            ("--chaos", request.chaos_seed is not None),
            ("--require-prepared", request.requires_prepared),
        )
        if is_given
    ]
    raise_if(problems, ConfigurationError)


def _restores_here(request: RunRequest) -> bool:
    """Whether this process will read the run's checkpoint itself, as far as this is known before torch is
    imported.

    A process that forks workers must not have threads. If the number of workers is not given, it forks one
    for each accelerator. Ranks that torchrun has started receive the state from rank 0, or read only their
    part of a sharded model.
    """
    run = request.loaded.run
    runtime = run.training.runtime
    if request.num_nodes is not None or os.environ.get("RANK", "0") != "0":
        return False
    if runtime.parallelism == "fsdp2" and os.environ.get("WORLD_SIZE", "1") != "1":
        return False
    is_on_cpu = runtime.device == "cpu" or not has_accelerator_driver()
    num_workers = (
        request.num_workers or run.spec.workers_per_node or (1 if is_on_cpu else 0)
    )
    return num_workers == 1
