"""``evergrad logs``: shows the output of a run's pods, even while the pods are replaced."""

import argparse
import sys
from functools import partial

from evergrad_cli.cluster.client.api_client import KubernetesCluster, connect
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    add_run_name,
    given_place,
    note,
    say,
)
from evergrad_cli.cluster.client.errors import (
    ClusterInputError,
    NotFoundError,
    RefusedError,
)
from evergrad_cli.cluster.commands.log_following import (
    LogFollower,
    LogReader,
    Selection,
    choose,
    list_pods,
    show_line,
)
from evergrad_cli.cluster.commands.waiting import Goal, judge, read_run
from evergrad_cli.cluster.render.runs import Run
from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import Problem

NAME = "logs"
EXAMPLES = """\
  evergrad logs docs-lm -f                  # the first node across its replaced pods, until the run ends
  evergrad logs docs-lm --all -f            # every node
  evergrad logs docs-lm --node 2 --previous # output of the previous attempt of node 2
  evergrad logs docs-lm --coordinator --tail 50
  evergrad logs docs-lm --all --json | jq -r 'select(.node == 1) | .line'

exit codes: 0 done; with -f the run is complete or deleted · 64 no such run or no output; with -f the run
failed because of its configuration or data, or waits for you · 70 the cluster does not answer; with -f the
run failed in another way"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_run_name(parser)
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="follow the output across replaced pods until the run ends",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--node",
        type=int,
        metavar="I",
        help="node with this index (default: the first node)",
    )
    which.add_argument("--all", action="store_true", help="all nodes")
    which.add_argument("--coordinator", action="store_true", help="the coordinator")
    parser.add_argument(
        "--previous",
        action="store_true",
        help="show the previous attempt of each node",
    )
    parser.add_argument(
        "--tail",
        type=int,
        metavar="N",
        help="start with the last N lines of each pod (default: all lines)",
    )
    parser.add_argument(
        "--timestamps", action="store_true", help="show the time of each line"
    )
    add_cluster_arguments(
        parser,
        json_help="print a JSON object for each line: node, role, attempt, pod, time, line",
    )


def execute(args: argparse.Namespace) -> int:
    """Print the output. Return 0, 64 or 70."""
    if args.follow and args.previous:
        raise ClusterInputError(
            Problem(
                "--previous",
                "cannot be followed",
                "it has ended",
                "Leave out -f or --previous",
            )
        )
    if args.tail is not None and args.tail < 0:
        raise ClusterInputError(
            Problem("--tail", f"{args.tail} is negative", "", "Give the number of lines")
        )
    # Prefix lines with their node if more than one node can be shown. With -f, another node may become the
    # lowest.
    selection = Selection(args.node, args.all, args.coordinator)
    with connect(args) as cluster:
        shown = partial(
            show_line,
            prefix=args.all or args.follow,
            with_time=args.timestamps,
            as_json=args.json,
        )
        reader = LogReader(cluster, lambda line: say(shown(line)), tail=args.tail)
        if not args.follow:
            return _show_once(cluster, args, selection, reader)

        # Follow the run to its end. The command returns the run's outcome, or 0 if the run is deleted by
        # then.
        stall = LogFollower(cluster, args.name, selection, reader, remark=note).follow()
        try:
            outcome = stall or judge(read_run(cluster, args.name), Goal.COMPLETE)
        except NotFoundError:
            return int(ExitCode.DONE)
    note(f"trainingrun/{args.name} {outcome.text}")
    sys.stdout.flush()
    return int(outcome.exit_code or 0)


def _show_once(
    cluster: KubernetesCluster,
    args: argparse.Namespace,
    selection: Selection,
    reader: LogReader,
) -> int:
    run = read_run(cluster, args.name)
    pods = list_pods(cluster, args.name)
    chosen = choose(pods, selection, is_previous=args.previous)

    if not chosen:
        raise ClusterInputError(_explain_no_pod(run, args, has_pods=bool(pods)))

    # Show one pod after the other, so that their lines do not mix.
    newest = {pod.name for pod in choose(pods, Selection(None, True, args.coordinator))}
    failures: list[Problem] = []
    for pod in chosen:
        if not pod.has_started:
            failures.append(
                Problem(
                    f"pod {pod.name}",
                    "has no output yet",
                    pod.message or f"it is {pod.phase}",
                )
            )
            continue
        try:
            # A coordinator is restarted in its pod; nodes get new pods.
            reader.read(
                pod, is_previous=args.previous and pod.name in newest and not pod.is_over
            )
        except (NotFoundError, RefusedError) as error:
            failures += error.problems

    # If one pod has no output, print a remark. If no pod has output, fail, so that a script notices it.
    if failures and len(failures) == len(chosen):
        raise ClusterInputError(*failures)
    for failure in failures:
        note(f"warning: {failure}")
    return int(ExitCode.DONE)


def _explain_no_pod(run: Run, args: argparse.Namespace, *, has_pods: bool) -> Problem:
    """Return why there is no pod to read.

    The reason is in the arguments, in the phase of the run, or in pods that no longer exist.
    """
    status = f"evergrad status {args.name}{given_place(args)}"
    where, what, why = f"trainingrun {args.name}", "has no pods", f"it is {run.phase}"
    remedy = "What it printed earlier is on its volume, in logs/"
    if args.previous:
        what, why = "has no earlier attempt whose pod still exists", ""
        remedy = "Older output is on its volume, in logs/"
    elif args.node is not None and has_pods:
        where, what, why = "--node", f"there is no pod of node {args.node}", ""
        remedy = f"See the existing nodes: {status}"
    elif run.phase in ("Pending", "Preparing", "Starting", "Waiting"):
        what, remedy = "has no pods yet", f"See why: {status}"
    return Problem(where, what, why, remedy)
