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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Wrong input: the problems on stderr, no traceback, exit 64."""
    # Threads of a CPU kernel that wait for each other spin for milliseconds by default, which starves whoever they wait for as
    # soon as anything else wants a core (another worker, a background save). Read once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    # A lost peer is an everyday event here, told in our own words; torch's C++ would add fifty frames for each.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    args = _build_parser().parse_args(argv)
    command = cast(Command, args.command)
    try:
        return command.execute(args)
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


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="evergrad",
        description="Train from one TrainingRun file: exact data order, checkpoints that survive kills, a report at the end.",
    )
    parser.add_argument("--version", action="version", version=f"evergrad {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"evergrad_trainer.cli.{name}")
        sub = commands.add_parser(
            module.NAME,
            help=module.HELP,
            description=module.HELP,
            epilog=f"examples:\n{module.EXAMPLES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(sub)
        sub.set_defaults(command=module)
    return parser
