"""``evergrad resume``: continues a run that was suspended or has stopped on request."""

import argparse
from typing import Any

from evergrad_cli.cluster.client.arguments import given_place
from evergrad_cli.cluster.commands.field_switch import (
    Switch,
    add_switch_arguments,
    finished,
    flip,
    new_nonce,
)
from evergrad_cli.cluster.commands.waiting import Goal
from evergrad_cli.cluster.render.runs import NON_FINITE, Run
from evergrad_manifest.errors import Problem

NAME = "resume"
EXAMPLES = """\
  evergrad resume docs-lm
  evergrad resume docs-lm --wait --timeout 5m      # until it trains"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_switch_arguments(parser, wait_help="wait until the run trains")


def execute(args: argparse.Namespace) -> int:
    """Set spec.suspend to false, or set a new spec.restartNonce after a stop on request.

    Return 0, or with ``--wait`` 0, 64, 70 or 124.
    """

    def check(run: Run) -> Problem | None:
        # Refuse this before any change: the pods would start, reach the same step and stop.
        if run.is_beyond_its_stop:
            what = (
                f"has finished step {run.checkpoint_step}, and spec.training.stop.afterStep is "
                f"{run.stop_after_step}"
            )
            why = "it would stop again immediately"
            remedy = (
                "Raise or remove spec.training.stop.afterStep in its file, submit the file, and resume the "
                "run again"
            )
            return Problem(f"trainingrun {run.name}", what, why, remedy)
        return finished(run, "resume", given_place(args))

    return flip(args, _choose, check=check)


def _choose(run: Run) -> Switch:
    """Return the change that continues this run: spec.suspend false, or a new restartNonce after a stop on
    request."""
    if not run.has_stopped_by_itself:
        return Switch(
            "resumed",
            {"suspend": False},
            Goal.RUNNING,
            lambda run: not run.wants_suspension,
        )

    # A stop on request is not a suspension. Only new pods end it, and only a new nonce requests new pods.
    nonce = new_nonce()
    spec: dict[str, Any] = {"restartNonce": nonce}
    if run.wants_suspension:
        spec["suspend"] = False
    why = "before a step that is not finite" if run.reason == NON_FINITE else "on request"
    verb = f"resumed by a new spec.restartNonce: it had stopped {why}"
    return Switch(
        verb, spec, Goal.RUNNING, lambda run: False, lambda run: run.restart_nonce == nonce
    )
