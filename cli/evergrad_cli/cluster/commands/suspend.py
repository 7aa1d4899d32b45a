"""``evergrad suspend``: lets a run save its state and release its nodes."""

import argparse

from evergrad_cli.cluster.client.arguments import given_place
from evergrad_cli.cluster.commands.field_switch import (
    Switch,
    add_switch_arguments,
    finished,
    flip,
)
from evergrad_cli.cluster.commands.waiting import Goal

NAME = "suspend"
EXAMPLES = """\
  evergrad suspend docs-lm
  evergrad suspend docs-lm --wait --timeout 2m     # until its pods are gone"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_switch_arguments(
        parser, wait_help="wait until the state is saved and the pods are gone"
    )


def execute(args: argparse.Namespace) -> int:
    """Set spec.suspend. Return 0, or with ``--wait`` 0, 64, 70 or 124."""
    switch = Switch(
        "suspended", {"suspend": True}, Goal.SUSPENDED, lambda run: run.wants_suspension
    )
    place = given_place(args)
    return flip(args, lambda run: switch, check=lambda run: finished(run, "suspend", place))
