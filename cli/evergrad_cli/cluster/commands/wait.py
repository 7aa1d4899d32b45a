"""``evergrad wait``: waits until a run is complete, failed, running or suspended."""

import argparse

from evergrad_cli.cluster.client.api_client import connect
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    add_run_name,
    add_timeout,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.commands.waiting import Goal, WaitOutcome, wait_for

NAME = "wait"
EXAMPLES = """\
  evergrad wait docs-lm
  evergrad wait docs-lm --for running --timeout 5m
  evergrad wait docs-lm --for suspended && kubectl drain my-node
  evergrad wait docs-lm || evergrad status docs-lm

exit codes: 0 reached · 64 no such run, the run failed because of its configuration or data, or it waits for
you (condition Stalled for 30 s) · 70 the run ended in another state, was deleted, or the cluster does not
answer · 124 the timeout is over"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_run_name(parser)
    parser.add_argument(
        "--for", dest="goal", type=Goal, choices=list(Goal), default=Goal.COMPLETE, metavar="STATE",
        help="state to wait for: complete (default), failed, running or suspended",
    )  # fmt: skip
    add_timeout(parser, default="0")
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Wait for the run. Return 0 if the goal is reached, otherwise 64, 70 or 124."""
    with connect(args) as cluster:
        outcome, _ = wait_for(cluster, args.name, args.goal, timeout=args.timeout)
    return report(args, outcome)


def report(args: argparse.Namespace, outcome: WaitOutcome) -> int:
    """Print the outcome of a wait for ``args.name`` and return its exit code."""
    # Print to stdout or stderr by outcome: `evergrad wait x && …` must not print a failure as success.
    code = int(outcome.exit_code or 0)
    if args.json:
        say_json(
            {
                "name": args.name,
                "reached": code == 0,
                "exitCode": code,
                "message": outcome.text,
            }
        )
    else:
        (say if code == 0 else note)(f"trainingrun/{args.name} {outcome.text}")
    return code
