"""``evergrad list``: shows the runs of one namespace or of all namespaces, as ``kubectl get trun`` does."""

import argparse
import time
from collections.abc import Sequence

from evergrad_cli.cluster.client.api_client import connect, runs_path
from evergrad_cli.cluster.client.arguments import (
    add_all_namespaces,
    add_cluster_arguments,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.render.runs import Run, parse_run, row_of
from evergrad_cli.cluster.render.text import NOTHING, age, table
from evergrad_common.contract import ExitCode

NAME = "list"
EXAMPLES = """\
  evergrad list
  evergrad list -A --wide
  evergrad list -l team=docs --phase Running
  evergrad list --json | jq -r '.runs[] | select(.phase == "Failed") | .name'"""
_HEADERS = (
    "NAME",
    "PHASE",
    "NODES",
    "STEP",
    "LOSS",
    "TOK/S",
    "ETA",
    "CHECKPOINT",
    "RESTARTS",
    "AGE",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_all_namespaces(parser)
    parser.add_argument(
        "-l",
        "--selector",
        metavar="LABELS",
        help="show only runs with these labels, for example team=docs,stage!=test",
    )
    parser.add_argument(
        "--phase", metavar="PHASE", help="only runs in this phase, e.g. Running"
    )
    parser.add_argument(
        "--wide",
        action="store_true",
        help="also show pod-hours, GPU-hours, waste, reason and message",
    )
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Print the runs. Return 0, even for an empty list."""
    with connect(args) as cluster:
        path = runs_path(None if args.all_namespaces else cluster.namespace)
        query = {"labelSelector": args.selector} if args.selector else {}
        runs = [
            parse_run(raw) for raw in cluster.items(path, what="trainingruns", query=query)
        ]
        namespace = cluster.namespace
    # Filter here and not in the query, because the API server cannot select by fields of the status.
    if args.phase:
        runs = [run for run in runs if run.phase.lower() == args.phase.lower()]

    # The API server does not guarantee an order, so sort here.
    runs.sort(key=lambda run: (run.namespace, run.name))
    now = time.time()
    if args.json:
        say_json({"runs": [row_of(run, now=now) for run in runs]})
    elif not runs:
        note(
            "No runs found."
            if args.all_namespaces
            else f"No runs found in namespace {namespace}."
        )
    else:
        for line in render(
            runs, now=now, with_namespace=args.all_namespaces, is_wide=args.wide
        ):
            say(line)
    return int(ExitCode.DONE)


def render(
    runs: Sequence[Run], *, now: float, with_namespace: bool = False, is_wide: bool = False
) -> list[str]:
    """Return the lines of the table. ``now`` in Unix seconds."""
    headers = (
        *(("NAMESPACE",) if with_namespace else ()),
        *_HEADERS,
        *(("POD-HOURS", "GPU-HOURS", "WASTE", "REASON", "MESSAGE") if is_wide else ()),
    )
    rows = []
    for run in runs:
        row = [run.namespace] if with_namespace else []
        row += [
            run.name,
            "Deleting" if run.is_deleting else run.phase,
            run.nodes or NOTHING,
            step_of(run),
            run.loss or NOTHING,
            run.tokens_per_second or NOTHING,
            run.eta or NOTHING,
            NOTHING if run.checkpoint_step is None else str(run.checkpoint_step),
            str(run.restarts),
            age(None if run.created is None else now - run.created),
        ]
        # The operator writes usage as a text that is already rounded.
        if is_wide:
            keys = ("podHours", "gpuHours", "waste")
            used = [str(run.usage.get(key) or NOTHING) for key in keys]
            row += [*used, run.reason or NOTHING, run.message or NOTHING]
        rows.append(row)
    return table(headers, rows)


def step_of(run: Run) -> str:
    """Return the step of a run and its total, for example ``1200/20000``."""
    if run.step is None:
        return NOTHING
    return f"{run.step}/{run.total_steps}" if run.total_steps else str(run.step)
