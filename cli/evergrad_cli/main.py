"""``evergrad``: finds the command, runs it, and turns errors into one clear message and an exit code."""

import argparse
import contextlib
import difflib
import importlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from typing import NoReturn, Protocol, cast

from evergrad_cli import __version__
from evergrad_cli.huge_pages import begin_anew_with_huge_pages
from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import EvergradError, InputError, Problem, describe_problem


class Command(Protocol):
    """Interface of a module that implements a command."""

    NAME: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, args: argparse.Namespace) -> int: ...


# Descriptions of commands are here and not in the commands, so that `evergrad --help` imports none: half
# of them need torch's packages.
COMMANDS = {
    "run": "train a TrainingRun on this machine; if you start it again, it continues where it stopped",
    "node": "run one node of an elastic run: join its coordinator, train, leave on request",
    "validate": "check a TrainingRun and report all problems",
    "preflight": "check files, memory, free space, devices and the run directory, without training",
    "prepare": "tokenize a run's data in parallel; data that are already prepared are only checked",
    "report": "write a run's report: an HTML file with plots, and the same facts as Markdown",
    "evaluate": "evaluate checkpoints of a run on its evaluation sets, while the run trains or later",
    "checkpoint": "list, verify or export the checkpoints of a run",
    "compare-runs": "compare two runs step by step: samples, losses, tokens, learning rates, evaluations",
    "completion": "print a script that makes bash, zsh or tcsh complete commands and options",
}
"""Commands for this machine.

Commands without a module in this package come with evergrad-trainer, as entry points of COMMAND_GROUP.
"""
COMMAND_GROUP = "evergrad.commands"
OWN_COMMANDS = ("validate", "completion")
CLUSTER_COMMANDS = {
    "submit": "submit a TrainingRun to the cluster; a second submit updates it",
    "list": "list the runs on the cluster",
    "status": "show one run on the cluster: progress, pods, last failure, and what to do next",
    "logs": "show the output of a run on the cluster; -f follows it across replaced pods until the run ends",
    "stacks": "print the stacks of all processes of a run, here or on the cluster, while it trains",
    "open": "open the live page of a run in a browser: curves, members, events, remaining time",
    "wait": "wait until a run on the cluster is complete, failed, running or suspended",
    "suspend": "suspend a run on the cluster: it saves its state and its pods leave",
    "resume": "resume a suspended or stopped run on the cluster, at the step where it stopped",
    "restart": "restart a run on the cluster from its newest checkpoint, even if it has failed",
    "checkpoints": "show the newest checkpoint of a run on the cluster, and how to list all checkpoints",
    "top": "show the speed of the runs on the cluster, and the CPU and memory that they use",
    "prune": "list leftovers of runs, on the cluster or in run directories; delete them with --yes",
    "doctor": "check whether runs can work on this cluster, in this namespace, for you",
}
"""Commands for a cluster, each with its module in ``cluster/``."""
OTHERS_COMMANDS = {
    "train": "Use `evergrad run`",
    "fit": "Use `evergrad run`",
    "eval": "Use `evergrad evaluate`",
    "test": "Use `evergrad evaluate`",
    "tokenize": "Use `evergrad prepare`",
    "pretokenize": "Use `evergrad prepare`",
    "export": "Use `evergrad checkpoint export`",
    "serve": "Evergrad trains models and serves none. Export one by `evergrad checkpoint export`, and give "
    "the directory to a server that reads models of transformers, such as vLLM",
}
"""Names of commands in other trainers, each with the replacement here."""
KNOWN_VARIABLES = (
    "EVERGRAD_CHAOS_KIND",
    "EVERGRAD_COORDINATOR_",
    "EVERGRAD_GENERATION",
    "EVERGRAD_IMAGE_DIGEST",
    "EVERGRAD_NODE",
    "EVERGRAD_NODE_STATE",
    "EVERGRAD_POD_IP",
    "EVERGRAD_STOP_SECONDS",
    "EVERGRAD_TOKEN_FILE",
    "EVERGRAD_TRANSPORT",
    # Of a checkout: tests and their cluster.
    "EVERGRAD_BED",
    "EVERGRAD_CACHE",
    "EVERGRAD_E2E",
    "EVERGRAD_TEST",
)
"""Prefixes of the environment variables that Evergrad reads, except the operator's."""
_OWN_PACKAGES = (
    "evergrad",
    "evergrad_cli",
    "evergrad_common",
    "evergrad_coordinator",
    "evergrad_manifest",
    "evergrad_trainer",
)
_INTERRUPTED = 130
_TRAINING_COMMANDS = ("run", "node", "evaluate")
"""Commands that compute long enough to benefit from huge pages."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. If the input is wrong, print the problems and return 64."""
    # By default, threads of a CPU kernel spin for milliseconds while they wait for each other. If another
    # worker or a background save needs the core, the spinning starves the thread that they wait for. The
    # variable is read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # We log our own message for a lost peer, which is common; torch would add fifty C++ frames to each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None and arguments[:1] and arguments[0] in _TRAINING_COMMANDS:
        # This replaces the process, so it comes before the expensive imports.
        begin_anew_with_huge_pages()
    parser = _Parser(
        prog="evergrad",
        description=(
            "Train from one TrainingRun file, with an exact order of the data, checkpoints that "
            "survive kills, and a report at the end."
        ),
        epilog=f"on a cluster: {', '.join(CLUSTER_COMMANDS)}; also as kubectl evergrad COMMAND",
    )
    _add_commands(parser, {**COMMANDS, **CLUSTER_COMMANDS}, arguments)
    for message in find_unknown_variables(os.environ):
        print(f"warning: {message}", file=sys.stderr)
    if arguments and arguments[0] in OTHERS_COMMANDS:
        parser.error(f"{arguments[0]} is not a command. {OTHERS_COMMANDS[arguments[0]]}.")
    return _execute(parser.parse_args(arguments))


def find_unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Describe variables that begin with EVERGRAD_ and that no part of Evergrad reads.

    Returns nothing in a pod, because Kubernetes sets such variables for each Service. For example, the
    Service ``evergrad-docs`` adds ``EVERGRAD_DOCS_PORT``.
    """
    if "KUBERNETES_SERVICE_HOST" in environment:
        return []
    found = []
    for name in sorted(environment):
        if name.startswith("EVERGRAD_") and not name.startswith(KNOWN_VARIABLES):
            close = difflib.get_close_matches(name, KNOWN_VARIABLES, n=1)
            hint = (
                f"Did you mean {close[0]}?" if close else f"It has no effect: unset {name}."
            )
            found.append(f"the environment variable {name} is not known. {hint}")
    return found


def main_of_plugin(argv: Sequence[str] | None = None) -> int:
    """Run ``kubectl evergrad``, which has only the commands for a cluster."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = _Parser(
        prog="kubectl evergrad",
        description="Submit, follow, stop and maintain TrainingRuns on a cluster.",
    )
    _add_commands(parser, CLUSTER_COMMANDS, arguments)
    return _execute(parser.parse_args(arguments))


def _execute(args: argparse.Namespace) -> int:
    command = cast(Command, args.command)
    # If a stream was closed (`>&-`), discard its output. Python uses None for such a stream, which cannot be
    # flushed.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the exit
            setattr(sys, name, nowhere)
    try:
        code = command.execute(args)
    except KeyboardInterrupt:
        if not args.is_for_cluster:
            raise
        # The run is on the cluster and continues; only this command ends.
        code = _INTERRUPTED
    except EvergradError as error:
        code = int(error.exit_code)
        with contextlib.suppress(BrokenPipeError):
            print_error(error, as_json=args.errors == "json")
    except ModuleNotFoundError as error:
        code = int(ExitCode.USER_ERROR)
        with contextlib.suppress(BrokenPipeError):
            print(f"error: {_explain_missing(error, command.NAME)}", file=sys.stderr)
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe before the command ended.
        code = int(ExitCode.DONE)

    # Keep the exit code of the command. Without this, Python would flush at exit, report the closed pipe and
    # end with 120.
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            # Python flushes again at exit; discard that output.
            descriptor = os.open(os.devnull, os.O_WRONLY)
            os.dup2(descriptor, stream.fileno())
            os.close(descriptor)
    return code


def print_error(error: EvergradError, *, as_json: bool) -> None:
    """Print every problem to stderr, one in each line: as a sentence, or as a JSON object with a dotted
    ``code``, the time in UTC and the parts of the problem."""
    problems = (
        error.problems
        if isinstance(error, InputError) and error.problems
        else [Problem("", str(error))]
    )
    for problem in problems:
        message = str(problem) if isinstance(error, InputError) else str(error)
        row = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "level": "error",
            "code": error.code,
            "exitCode": int(error.exit_code),
            "message": message,
            **describe_problem(problem),
        }
        print(json.dumps(row) if as_json else f"error: {message}", file=sys.stderr)


def _explain_missing(error: ModuleNotFoundError, command: str) -> str:
    """Return a message with the missing package that this command needs.

    Raises ``error`` itself if the package is one of ours.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in _OWN_PACKAGES:
        raise error
    return (
        f"evergrad {command}: needs the Python package {package}, which is not installed "
        "here; the commands for a "
        "cluster work without it. Install evergrad-trainer with all of its dependencies."
    )


class _Parser(argparse.ArgumentParser):
    """A parser that exits with 64 if the command line is wrong, as for any wrong input."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(ExitCode.USER_ERROR), f"error: {self.prog}: {message}\n")


def build_whole_parser() -> argparse.ArgumentParser:
    """Return a parser with all commands and all of their arguments, for completion and documentation.

    Imports every command. If the packages of a command are not installed, its parser has no arguments.
    """
    return _add_commands(_Parser(prog="evergrad"), {**COMMANDS, **CLUSTER_COMMANDS}, None)


def _add_commands(
    parser: _Parser, commands: Mapping[str, str], arguments: Sequence[str] | None
) -> _Parser:
    """Add all ``commands``.

    Only the command that ``arguments`` begin with is imported and gets its own arguments; None means all.
    """
    parser.add_argument(
        "--version", action="version", version=f"{parser.prog} {__version__}"
    )
    sub_parsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in commands.items():
        sub = sub_parsers.add_parser(
            name,
            help=text,
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        # Import one command, not twenty: half of them need packages that take seconds to import.
        if arguments is not None and list(arguments[:1]) != [name]:
            continue

        module = _import_command(name)
        if isinstance(module, str):
            # A shell can still complete the other commands.
            if arguments is None:
                continue
            parser.exit(int(ExitCode.USER_ERROR), f"error: {module}\n")
        sub.epilog = "examples:\n" + module.EXAMPLES.replace(
            "  evergrad ", f"  {parser.prog} "
        )
        module.add_arguments(sub)
        sub.add_argument(
            "--errors",
            choices=["text", "json"],
            default="text",
            help="format of an error that ends the command: text, or JSON with one object in each line",
        )
        sub.set_defaults(command=module, is_for_cluster=name in CLUSTER_COMMANDS)
    return parser


def _import_command(name: str) -> Command | str:
    """Return the module of a command, or a message with the package that is missing."""
    # A module of this package, or the entry point of an installed package for the command.
    if name in CLUSTER_COMMANDS or name in OWN_COMMANDS:
        folder = ".cluster.commands" if name in CLUSTER_COMMANDS else ".local"
        # Completion imports this module, so it is not in the folder below.
        path = f"evergrad_cli{'' if name == 'completion' else folder}.{name}"
    elif entries := metadata.entry_points(group=COMMAND_GROUP, name=name):
        path = next(iter(entries)).module
    else:
        return (
            f"evergrad {name}: comes with the Python package evergrad-trainer, which is not "
            "installed here. Install it, or use the commands for a cluster."
        )
    try:
        return cast(Command, importlib.import_module(path))
    except ModuleNotFoundError as error:
        return _explain_missing(error, name)
