"""``evergrad node``: one node of an elastic run, started by a user or as the first process of a pod."""

import argparse
import dataclasses
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from evergrad_common.addresses import split_address
from evergrad_common.contract import ExitCode
from evergrad_common.secret import read_token
from evergrad_coordinator.edge.stacks import register_stacks
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_manifest.reading.loader import LoadedManifest, load_from
from evergrad_trainer.base.errors import HostError
from evergrad_trainer.base.host_errors import is_host_trouble
from evergrad_trainer.base.machine import Machine
from evergrad_trainer.commands.pod import (
    add_pod_arguments,
    last_words,
    sigterm_interrupts,
    try_patiently,
)
from evergrad_trainer.commands.run_arguments import (
    add_run_arguments,
    delay_compiler,
    machine_and_workers,
    run_directory_of,
    world_sizes_of,
)
from evergrad_trainer.commands.session_plan import PlanRequest, plan_session
from evergrad_trainer.run.directory import RunDirectory
from evergrad_trainer.run.resume import RunState, inspect_directory

if TYPE_CHECKING:
    from evergrad_trainer.node.settings import NodeSettings

NAME = "node"
EXAMPLES = """\
  evergrad node trainingrun.yaml --join 127.0.0.1:29400 --token-file FILE   # as `evergrad run --nodes` prints
  evergrad node trainingrun.yaml --join run:29400 --token-file token --node 3 --address 10.0.0.7"""

_ACCELERATOR_PREFIXES = ("nvidia.com/", "amd.com/")
_FIRST_OWN_INDEX = 1000
"""First index for nodes that are added without one; larger than the indices of a launcher or operator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments: the node's run and coordinator, and its resources."""
    add_run_arguments(parser)
    parser.add_argument(
        "--join",
        required=True,
        metavar="HOST:PORT",
        help="address of the run's coordinator",
    )
    parser.add_argument(
        "--node",
        type=int,
        metavar="INDEX",
        help="index of this node, which orders the ranks (default: a free index)",
    )
    parser.add_argument(
        "--address",
        metavar="IP",
        help="address at which other nodes reach this node (default: the address that the coordinator sees)",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help="file with the run's token, as the coordinator has it",
    )
    add_pod_arguments(parser)
    parser.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="time from SIGTERM until the node leaves alone (default: 25; for a script its own, if longer)",
    )
    parser.add_argument(
        "--start-method",
        choices=["auto", "fork", "forkserver", "spawn"],
        default="auto",
        help="how workers are started (default: auto)",
    )


@dataclass(frozen=True)
class NodeRequest:
    """The checked arguments of ``evergrad node``."""

    loaded: LoadedManifest
    directory: RunDirectory
    settings: "NodeSettings"
    """Settings from the arguments; the settings from the manifest are added after it is checked."""
    num_workers: int | None = None
    """Number of training processes of this node; None: the number in the manifest."""
    has_grace: bool = False
    """Whether the grace period was given as an argument, which then overrides a script's grace period."""
    start_method: Literal["auto", "fork", "forkserver", "spawn"] = "auto"


def execute(args: argparse.Namespace) -> int:
    """Check, prepare and serve; returns the exit code of this node's part (0, 64, 70, 75 or 76)."""
    register_stacks("" if args.node is None else f"node {args.node}")

    def prepare() -> Callable[[], int]:
        # Read the manifest again at each attempt, because it may be on the mount that failed.
        settings, loaded = _settings(args), load_from(args)
        if args.base_directory is not None:
            loaded = dataclasses.replace(
                loaded, base_directory=args.base_directory.absolute()
            )
        request = NodeRequest(
            loaded,
            directory=RunDirectory(run_directory_of(args.run_directory, loaded.run)),
            settings=settings,
            num_workers=args.workers,
            has_grace=args.grace is not None,
            start_method=args.start_method,
        )
        return _prepare(request)

    with last_words(args.termination_log):
        try:
            with sigterm_interrupts():
                serve = try_patiently(prepare)
        except KeyboardInterrupt:
            return int(ExitCode.STOPPED_SAVED)
        return serve()


def _prepare(request: NodeRequest) -> Callable[[], int]:
    """Do all preparations before the node joins; returns a function that serves and returns the exit code."""
    loaded, directory, run = request.loaded, request.directory, request.loaded.run
    # Create the directory first, so that an unwritable volume is detected before minutes of imports.
    directory.create()
    run_state = inspect_directory(
        directory, run, extend=True, base_directory=loaded.base_directory
    )

    if run_state.state == "complete":
        # Do not train the run again, even if its coordinator is lost.
        print(f"{run.metadata.name} is complete, in {directory.path}. Nothing to do.")
        return lambda: int(ExitCode.DONE)

    # This process forks its workers, so it must not use an accelerator before the fork.
    machine, num_workers = machine_and_workers(request.num_workers, run, forks_above=0)
    _check_accelerator(run, machine)

    # Imports create objects that are never freed. Garbage collection would take a tenth of the start-up time.
    gc.disable()
    delay_compiler(run, machine, forks=True)
    # Import heavy modules only for a node that will serve, and before workers are forked, so that the workers
    # inherit the loaded modules.
    from evergrad_trainer.node.fingerprint import fingerprint
    from evergrad_trainer.node.run import prepare_process

    prepare_process()
    shared = fingerprint(run, loaded.base_directory)
    settings = dataclasses.replace(
        request.settings,
        run=run.metadata.name,
        run_directory=directory.path,
        fingerprint=shared,
    )
    request = dataclasses.replace(request, settings=settings)
    if run.spec.script is None:
        return _prepare_typed(request, run_state, machine, num_workers)

    return _prepare_script(request, num_workers)


def _check_accelerator(run: TrainingRun, machine: Machine) -> None:
    """Raise HostError if this pod has accelerators in its resources, and none is visible.

    Such a pod must not train on its CPU. On a laptop with the same file, the resources do not apply.
    """
    asked = [
        one for one in run.spec.resources.limits if one.startswith(_ACCELERATOR_PREFIXES)
    ]
    wants_cpu = run.spec.training is not None and run.spec.training.runtime.device == "cpu"
    has_none = machine.num_accelerators <= 0 and "KUBERNETES_SERVICE_HOST" in os.environ
    if asked and not wants_cpu and has_none:
        what = f"no accelerator is visible; spec.resources.limits asks for {asked[0]}"
        raise HostError(f"{what}. Check the driver of this host.")


def _prepare_typed(
    request: NodeRequest, run_state: RunState, machine: Machine, num_workers: int
) -> Callable[[], int]:
    from evergrad_trainer.node.fingerprint import fingerprint_of_plan
    from evergrad_trainer.node.run import choose_start_method, run_node

    # This machine is one of several, so preflight must consider all world sizes.
    pods = request.loaded.run.spec.evaluation
    asked = PlanRequest(
        request.loaded,
        request.directory,
        run_state,
        machine,
        num_workers,
        world_sizes=world_sizes_of(request.loaded.run, num_workers=num_workers),
        is_one_of_many=True,
        keep_waiting=0 if pods is None else pods.keep_waiting,
    )
    plan = plan_session(asked)
    shared = request.settings.fingerprint | fingerprint_of_plan(plan)
    settings = dataclasses.replace(
        request.settings, recovery=plan.run.recovery, fingerprint=shared
    )
    method = choose_start_method(
        request.start_method, num_accelerators=machine.num_accelerators
    )
    return lambda: run_node(plan, settings, num_workers=num_workers, start_method=method)


def _prepare_script(request: NodeRequest, num_workers: int) -> Callable[[], int]:
    from evergrad_trainer.commands.script_runs import prepare_script
    from evergrad_trainer.node.script_node import run_script_node, with_grace_of

    # A script has its own data and model, so there is no session plan.
    loaded, settings = request.loaded, request.settings
    script = loaded.run.script
    own = settings if request.has_grace else with_grace_of(script, settings)
    return prepare_script(
        loaded,
        request.directory,
        lambda: run_script_node(
            script,
            loaded.base_directory,
            own,
            num_workers=num_workers,
        ),
    )


def _settings(args: argparse.Namespace) -> "NodeSettings":
    """Read this node's settings from the arguments. Raises ConfigurationError with all invalid arguments."""
    from evergrad_trainer.node.settings import NodeSettings

    coordinator = split_address(args.join)
    problems = []
    if coordinator is None:
        problems.append(
            Problem(
                "--join",
                f"{args.join!r} is not HOST:PORT",
                "",
                "Give the address that evergrad run prints; one of IPv6 as [ADDRESS]:PORT",
            )
        )
    if args.node is not None and args.node < 0:
        problems.append(
            Problem(
                "--node",
                f"{args.node} is below 0",
                "",
                "Give the number of this node, from 0",
            )
        )
    if args.workers is not None and args.workers < 1:
        problems.append(
            Problem("--workers", f"{args.workers} is below 1", "", "Give a positive number")
        )
    # Check the token here, because this error is clearer than the coordinator's refusal.
    token = _read_token(args.token_file, problems)
    raise_if(problems, ConfigurationError)
    host, port = coordinator or ("", 0)
    return NodeSettings(
        run="",
        node=str(_FIRST_OWN_INDEX + os.getpid() if args.node is None else args.node),
        coordinator_host=host,
        coordinator_port=port,
        address=args.address or _own_address(host, port),
        recovery="fresh",
        run_directory=Path(),
        token=token,
        grace_seconds=NodeSettings.grace_seconds if args.grace is None else args.grace,
        termination_log=args.termination_log,
    )


def _read_token(path: Path | None, problems: list[Problem]) -> str:
    if path is None:
        remedy = "Give the file that evergrad run prints"
        problems.append(Problem("--token-file", "is missing", "", remedy))
        return ""
    try:
        return read_token(path)
    except (OSError, ValueError) as error:
        what, is_of_host = f"{path} cannot be read", is_host_trouble(error)
        problems.append(
            Problem(
                "--token-file", what, str(error), "Check the path", is_of_host=is_of_host
            )
        )
        return ""


def _own_address(host: str, port: int) -> str:
    """Find the address of this machine towards the coordinator. Raises ConfigurationError if none exists."""
    from evergrad_trainer.worker.sockets import address_towards

    try:
        return address_towards(host, port)
    except OSError as error:
        why = f"{error.strerror or error}".lower()
        raise ConfigurationError(
            Problem(
                "--join",
                f"{host} cannot be reached",
                why,
                "Check the name, or give --address",
            )
        ) from error
