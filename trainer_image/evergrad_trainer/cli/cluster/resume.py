"""``evergrad resume``: a suspended run goes on where it stopped."""

import argparse

from evergrad_trainer.cli.cluster.switching import Switch, add_switch_arguments, finished, flip
from evergrad_trainer.cli.cluster.waiting import Goal

NAME = "resume"
HELP = "resume a suspended run on the cluster, at the step where it stopped"
EXAMPLES = """\
  evergrad resume docs-lm
  evergrad resume docs-lm --wait --timeout 5m      # until it trains"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_switch_arguments(parser, wait_help="wait until the run trains")


def execute(args: argparse.Namespace) -> int:
    """Takes spec.suspend back. Returns 0, or of a wait 64, 70 or 124."""
    switch = Switch("resumed", {"suspend": False}, Goal.RUNNING, lambda run: not run.wants_suspension)
    return flip(args, switch, check=lambda run: finished(run, "resume"))
