"""``evergrad completion``: prints a script with which a shell completes commands, options and files."""

import argparse

from evergrad_common.contract import ExitCode

NAME = "completion"
EXAMPLES = """\
  evergrad completion bash > ~/.local/share/bash-completion/completions/evergrad
  evergrad completion zsh > ~/.zsh/completions/_evergrad"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "tcsh"),
        help="shell for which the script is printed",
    )


def execute(args: argparse.Namespace) -> int:
    """Print the script."""
    # Import argcomplete here, so that other commands do not wait for it, and the parser, because main imports
    # this module.
    import shtab

    from evergrad_cli.main import build_whole_parser

    print(shtab.complete(build_whole_parser(), shell=args.shell))
    return int(ExitCode.DONE)
