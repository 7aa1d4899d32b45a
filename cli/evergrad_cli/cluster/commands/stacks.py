"""``evergrad stacks``: prints the stacks of all processes of a run, on this machine or on a cluster."""

import argparse
import json
from pathlib import Path
from typing import Any

from evergrad_cli.cluster.client.api_client import Cluster, connect
from evergrad_cli.cluster.client.arguments import add_cluster_arguments, note, say, say_json
from evergrad_cli.cluster.client.errors import ClusterInputError
from evergrad_cli.cluster.commands.log_following import list_pods
from evergrad_cli.cluster.commands.waiting import read_run
from evergrad_cli.cluster.render.runs import NODE, Pod
from evergrad_common.contract import ExitCode, RunFile
from evergrad_coordinator.edge.stacks import StackProcess, find_processes, show_stacks
from evergrad_coordinator.edge.training_process import read_owner
from evergrad_manifest.errors import Problem

NAME = "stacks"
EXAMPLES = """\
  evergrad stacks runs/docs-lm              # a run on this machine, by its directory
  evergrad stacks docs-lm                   # every node of a run on the cluster, or of runs/docs-lm
  evergrad stacks docs-lm --node 2 --native # one node, with C and C++ stacks
  evergrad stacks --here                    # all processes of this machine or container, for example in a pod

Training continues meanwhile. With --native, each process pauses until the debugger has read it.

exit codes: 0 done · 64 no such run, or none of its processes runs · 70 the cluster does not answer"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "name",
        nargs="?",
        metavar="RUN",
        help="name of a run, or run directory of a run on this machine",
    )
    parser.add_argument(
        "--here",
        action="store_true",
        help="print every process of a run on this machine, or in this container",
    )
    parser.add_argument(
        "--node", type=int, metavar="I", help="on a cluster: the node of this index alone"
    )
    parser.add_argument(
        "--native",
        action="store_true",
        help="also print C and C++ stacks with eu-stack, py-spy or gdb, if one is installed",
    )
    add_cluster_arguments(
        parser, json_help="print one JSON document: node, process, stacks"
    )


def execute(args: argparse.Namespace) -> int:
    """Print the stacks. Return 0, 64 or 70."""
    if (args.name is None) != args.here:
        what = (
            "is given together with a run"
            if args.here
            else "or the name of a run is missing"
        )
        raise ClusterInputError(Problem("--here", what, "", "Give one of the two"))
    if args.here:
        return _show_local(args, find_processes(), where="this machine")

    # As for `evergrad open`, a directory is a run of this machine. A plain name may be a directory, too.
    for directory in (Path(args.name), Path("runs") / args.name):
        if (directory / RunFile.OWNER).exists() or (
            directory.is_dir() and "/" in args.name
        ):
            owner = read_owner(directory)
            found = (
                find_processes(owner.pid) if owner is not None and owner.is_alive else []
            )
            return _show_local(args, found, where=str(directory))
    with connect(args) as cluster:
        return _show_pods(cluster, args)


def _show_local(args: argparse.Namespace, found: list[StackProcess], *, where: str) -> int:
    if not found:
        why = "its command has ended, or runs on another machine"
        raise ClusterInputError(
            Problem(
                where,
                "no process of a run was found",
                why,
                "Start it, or name a run on the cluster",
            )
        )
    shown = [(process, show_stacks(process, native=args.native)) for process in found]
    if args.json:
        say_json([_describe(process, text) for process, text in shown])
    else:
        for _, text in shown:
            say(text)
    return int(ExitCode.DONE)


def _describe(process: StackProcess, text: str) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "process": process.name,
        "label": process.label,
        "stacks": text,
    }


def _show_pods(cluster: Cluster, args: argparse.Namespace) -> int:
    run = read_run(cluster, args.name)
    pods = [
        pod
        for pod in list_pods(cluster, args.name)
        if pod.role == NODE
        and pod.has_started
        and not pod.is_over
        and args.node in (None, pod.index)
    ]
    if not pods:
        what = (
            "has no pod that runs"
            if args.node is None
            else f"no pod of node {args.node} runs"
        )
        raise ClusterInputError(
            Problem(
                f"trainingrun {args.name}",
                what,
                f"it is {run.phase}",
                f"See `evergrad status {args.name}`",
            )
        )

    # Read one pod after the other, so that their lines do not mix.
    failures: list[Problem] = []
    documents: list[dict[str, Any]] = []
    for pod in pods:
        try:
            documents += _ask_pod(cluster, pod, native=args.native)
        except ClusterInputError as error:
            failures += error.problems
    if args.json:
        say_json(documents)
    else:
        for one in documents:
            say(f"[node {one['node']}] {one['stacks']}")
    if failures and not documents:
        raise ClusterInputError(*failures)
    for failure in failures:
        note(f"warning: {failure}")
    return int(ExitCode.DONE)


def _ask_pod(cluster: Cluster, pod: Pod, *, native: bool) -> list[dict[str, Any]]:
    """Run this command in a pod and return its documents.

    Raises the errors of the cluster, and ClusterInputError.
    """
    command = ["evergrad", NAME, "--here", "--json", *(["--native"] if native else [])]
    text = cluster.execute(pod.name, pod.container, command)
    try:
        found = json.loads(text)
    except ValueError as error:
        words = text.strip().splitlines()[-1:] or ["nothing"]
        what = f"`{' '.join(command)}` printed no stacks"
        remedy = "Its image may be older than this command: use the same version of both"
        raise ClusterInputError(
            Problem(f"pod {pod.name}", what, words[0][:200], remedy)
        ) from error
    return [{"node": pod.index, "pod": pod.name, **one} for one in found]
