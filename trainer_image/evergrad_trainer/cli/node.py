"""``evergrad node``: one node of an elastic run, added by hand or as the first process of a pod."""

import argparse
import dataclasses
import gc
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING

from evergrad_coordinator.contract import ExitCode
from evergrad_coordinator.secret import read_token
from evergrad_trainer.cli.manifest_arguments import load_from
from evergrad_trainer.cli.planning import plan_session, sigterm_interrupts
from evergrad_trainer.cli.run_arguments import add_run_arguments, machine_and_workers, run_directory_of
from evergrad_trainer.config.loader import LoadedManifest
from evergrad_trainer.errors import ConfigurationError, Problem, raise_if
from evergrad_trainer.resume import Standing, inspect_directory, resolved_script_record
from evergrad_trainer.run_directory import RunDirectory
from evergrad_trainer.script_files import script_problems

if TYPE_CHECKING:
    from evergrad_trainer.node.supervisor import NodeSettings

NAME = "node"
EXAMPLES = """\
  evergrad node trainingrun.yaml --join 127.0.0.1:29400 --token-file FILE   # both as `evergrad run --nodes` prints them
  evergrad node trainingrun.yaml --join coordinator:29400 --token-file token --node 3 --address 10.0.0.7 --workers 2"""

_FIRST_OWN_INDEX = 1000
"""Nodes that are added without a number get one above those of a launcher or an operator."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the node belongs, and what it brings."""
    add_run_arguments(parser)
    parser.add_argument("--join", required=True, metavar="HOST:PORT", help="where the run's coordinator listens")
    parser.add_argument("--node", type=int, metavar="INDEX", help="number of this node; ranks follow it (default: a free one)")
    parser.add_argument("--address", metavar="IP", help="where other nodes reach this one (default: as the coordinator does)")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="the file with the run's token, its coordinator's")
    parser.add_argument(
        "--base-directory", type=Path, metavar="DIR", help="where relative paths of the manifest start (default: its own folder)"
    )
    parser.add_argument(
        "--grace", type=float, metavar="SECONDS", help="from SIGTERM to leaving alone (25; of a script its own, if longer)"
    )
    parser.add_argument(
        "--start-method", choices=["auto", "fork", "forkserver", "spawn"], default="auto", help="how workers are started (auto)"
    )
    parser.add_argument("--termination-log", type=Path, metavar="FILE", help="gets the root cause of a failure, 4 KiB at most")


def execute(args: argparse.Namespace) -> int:
    """Check → prepare → serve; the exit code says how this node's part ended (0, 64, 70, 75, 76)."""
    settings, loaded = _settings(args), load_from(args)
    directory = RunDirectory(run_directory_of(args, loaded.run))
    directory.create()
    if args.base_directory is not None:
        loaded = dataclasses.replace(loaded, base_directory=args.base_directory.absolute())
    standing = inspect_directory(directory, loaded.run, extend=False)
    if standing.state == "complete":
        # Nothing is trained twice, whatever became of those who knew that the run had ended.
        print(f"{loaded.run.metadata.name} is complete, in {directory.path}. Nothing to do.")
        return int(ExitCode.DONE)
    gc.disable()
    # Heavy imports, for a node that will serve; before workers are forked, so that these start warm.
    from evergrad_trainer.node.run import fingerprint, prepare_process

    prepare_process()
    run = loaded.run
    settings = dataclasses.replace(settings, run=run.metadata.name, run_directory=directory.path, fingerprint=fingerprint(run))
    if run.spec.script is None:
        return _serve_typed(args, loaded, settings, standing)
    return _serve_script(args, loaded, settings)


def _serve_typed(args: argparse.Namespace, loaded: LoadedManifest, settings: "NodeSettings", standing: Standing) -> int:
    from evergrad_trainer.node.run import choose_start_method, recovery_of, run_node

    directory = RunDirectory(settings.run_directory)
    machine, num_workers = machine_and_workers(args, loaded.run, may_touch=False)
    try:
        with sigterm_interrupts():
            plan = plan_session(args, loaded, directory, standing, machine, num_workers)
    except KeyboardInterrupt:
        return int(ExitCode.STOPPED_SAVED)
    settings = dataclasses.replace(settings, recovery=recovery_of(plan))
    method = choose_start_method(args.start_method, num_accelerators=machine.num_accelerators)
    return run_node(plan, settings, num_workers=num_workers, start_method=method)


def _serve_script(args: argparse.Namespace, loaded: LoadedManifest, settings: "NodeSettings") -> int:
    from evergrad_trainer.node.run import run_script_node, with_grace_of
    from evergrad_trainer.node.scripts import preload

    script, base, directory = loaded.run.script, loaded.base_directory, RunDirectory(settings.run_directory)
    raise_if(script_problems(script, base_directory=base), ConfigurationError)
    _, num_workers = machine_and_workers(args, loaded.run, may_touch=False)
    # Each node writes the same, so the directory tells whose it is whoever comes first, and that all is done whoever goes last.
    directory.write_resolved(resolved_script_record(loaded.run, base_directory=os.path.relpath(base, directory.path)))
    preload(script, base)
    if args.grace is None:
        settings = with_grace_of(script, settings)
    code = run_script_node(script, base, settings, num_workers=num_workers)
    if code == ExitCode.DONE:
        directory.mark_complete({"run": loaded.run.metadata.name, "time": time.time()})
    return code


def _settings(args: argparse.Namespace) -> "NodeSettings":
    """What the arguments say of this node. Raises ConfigurationError with all that is wrong with them."""
    from evergrad_trainer.node.supervisor import NodeSettings

    host, _, port = args.join.rpartition(":")
    problems = []
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        problems.append(Problem("--join", f"{args.join!r} is not HOST:PORT", "", "Give the address that evergrad run prints"))
    if args.node is not None and args.node < 0:
        problems.append(Problem("--node", f"{args.node} is below 0", "", "Give the number of this node, from 0"))
    if args.workers is not None and args.workers < 1:
        problems.append(Problem("--workers", f"{args.workers} is below 1", "", "Give a positive number"))
    token = ""
    if args.token_file is None:
        problems.append(Problem("--token-file", "is missing", "", "Give the file that evergrad run prints"))
    else:
        try:
            token = read_token(args.token_file)
        except (OSError, ValueError) as error:
            problems.append(Problem("--token-file", f"{args.token_file} cannot be read", str(error), "Check the path"))
    raise_if(problems, ConfigurationError)
    return NodeSettings(
        run="",
        node=str(_FIRST_OWN_INDEX + os.getpid() if args.node is None else args.node),
        coordinator_host=host,
        coordinator_port=int(port),
        address=args.address or _own_address(host, int(port)),
        recovery="fresh",
        run_directory=Path(),
        token=token,
        grace_seconds=NodeSettings.grace_seconds if args.grace is None else args.grace,
        termination_log=args.termination_log,
    )


def _own_address(host: str, port: int) -> str:
    """The address of this machine that leads to the coordinator. Nothing is sent. Raises ConfigurationError."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        why = f"{error.strerror or error}".lower()
        raise ConfigurationError(
            Problem("--join", f"{host} cannot be reached", why, "Check the name, or give --address")
        ) from error
