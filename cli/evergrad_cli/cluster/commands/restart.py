"""``evergrad restart``: replaces the pods of a run, which continues from its newest checkpoint, even after a
failure."""

import argparse
from typing import Any

from evergrad_cli.cluster.client.arguments import given_place
from evergrad_cli.cluster.commands.field_switch import (
    Switch,
    add_switch_arguments,
    flip,
    new_nonce,
)
from evergrad_cli.cluster.commands.waiting import Goal
from evergrad_cli.cluster.render.runs import Run
from evergrad_manifest.errors import Problem

NAME = "restart"
EXAMPLES = """\
  evergrad restart docs-lm                       # a failed run starts again; a running run gets new pods
  evergrad restart docs-lm --wait --timeout 5m   # until it trains again"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_switch_arguments(parser, wait_help="wait until the run trains again")


def execute(args: argparse.Namespace) -> int:
    """Set a new spec.restartNonce. Return 0, or with ``--wait`` 0, 64, 70 or 124."""
    # The change is never already made: each use of the command requests new pods. The wait begins when the
    # operator has seen the change.
    nonce = new_nonce()

    def choose(run: Run) -> Switch:
        spec: dict[str, Any] = {"restartNonce": nonce}
        verb = "restarted"
        # Only a failed run can be suspended here. With only the nonce, it would stay suspended and need
        # another command.
        if run.wants_suspension:
            spec["suspend"] = False
            verb = "restarted; spec.suspend is reset to false"
        return Switch(
            verb,
            spec,
            Goal.RUNNING,
            lambda run: False,
            lambda run: run.restart_nonce == nonce,
        )

    def check(run: Run) -> Problem | None:
        where = f"trainingrun {run.name}"
        if run.is_true("Complete"):
            remedy = (
                "To train further, start a new run whose spec.training.initFrom names the checkpoints of "
                "this run"
            )
            return Problem(
                where, "is complete; a complete run never trains again", "", remedy
            )
        if run.wants_suspension and not run.has_failed:
            remedy = f"To continue: evergrad resume {run.name}{given_place(args)}"
            return Problem(where, "is suspended; it has no pods to restart", "", remedy)
        return None

    return flip(args, choose, check=check)
