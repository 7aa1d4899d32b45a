"""``evergrad``: finds the command, runs it, and turns errors into one clear message and an exit code."""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from evergrad_coordinator.contract import ExitCode
from evergrad_trainer import __version__
from evergrad_trainer.errors import EvergradError, InputError


class Command(Protocol):
    """What each module of ``cli/`` that is a command offers."""

    NAME: str
    HELP: str
    EXAMPLES: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def execute(self, args: argparse.Namespace) -> int: ...


COMMANDS = ("run", "node", "validate", "preflight", "prepare", "report", "checkpoint", "compare_runs")
CLUSTER_COMMANDS = (
    "submit", "list", "status", "logs", "wait", "suspend", "resume", "restart", "checkpoints", "top", "doctor",
)  # fmt: skip
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Wrong input: the problems on stderr, no traceback, exit 64."""
    # Threads of a CPU kernel that wait for each other spin for milliseconds by default, which starves whoever they wait for as
    # soon as anything else wants a core (another worker, a background save). Read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # A lost peer is an everyday event here, told in our own words; torch's C++ would add fifty frames for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    arguments = sys.argv[1:] if argv is None else list(argv)
    return _execute(_build_parser(arguments).parse_args(arguments))


def main_of_plugin(argv: Sequence[str] | None = None) -> int:
    """``kubectl evergrad``: the commands for a cluster alone."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    return _execute(_build_plugin_parser(arguments).parse_args(arguments))


def _execute(args: argparse.Namespace) -> int:
    command = cast(Command, args.command)
    try:
        return command.execute(args)
    except KeyboardInterrupt:
        if not args.is_for_cluster:
            raise
        # Nothing of the run is on this machine; whoever followed it has seen enough.
        return _INTERRUPTED
    except InputError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return int(error.exit_code)
    except EvergradError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        sys.stderr.close()
        return int(ExitCode.DONE)


class _Parser(argparse.ArgumentParser):
    """A wrong command line is wrong input like any other: exit 64."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(int(ExitCode.USER_ERROR), f"error: {self.prog}: {message}\n")


def _build_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evergrad",
        description="Train from one TrainingRun file: exact data order, checkpoints that survive kills, a report at the end.",
        epilog=f"on a cluster: {', '.join(CLUSTER_COMMANDS)}; also as kubectl evergrad COMMAND",
    )
    _add_commands(parser, [*COMMANDS, *(f"cluster.{name}" for name in CLUSTER_COMMANDS)], arguments)
    return parser


def _build_plugin_parser(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    parser = _Parser(prog="kubectl evergrad", description="TrainingRuns on a cluster: submit, follow, stop and look after them.")
    _add_commands(parser, [f"cluster.{name}" for name in CLUSTER_COMMANDS], arguments)
    return parser


def _add_commands(parser: argparse.ArgumentParser, names: Sequence[str], arguments: Sequence[str]) -> None:
    """Add the command that ``arguments`` begin with, or all of ``names``: to import all takes longer than most of them run."""
    asked = [name for name in names if arguments and arguments[0] == name.rpartition(".")[2].replace("_", "-")]
    parser.add_argument("--version", action="version", version=f"{parser.prog} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in asked or names:
        module = importlib.import_module(f"evergrad_trainer.cli.{name}")
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP,
            epilog="examples:\n" + module.EXAMPLES.replace("  evergrad ", f"  {parser.prog} "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(command=module, is_for_cluster=name.startswith("cluster."))
