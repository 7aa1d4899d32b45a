"""python -m bed up | down | status | prepare | tools | images | load | kubectl …"""

import argparse
import os
import sys
from pathlib import Path

from bed import boxes, cgroups, cluster, images, loading, requirements, state, toolbox
from bed.places import KUBECONFIG, NODES
from bed.shell import BedError


def main() -> int:
    """Run a command. Return 1, after a one-line message, if it fails."""
    arguments = _parser().parse_args()
    try:
        code = _act(arguments)
    except (BedError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return code or 0


def _act(arguments: argparse.Namespace) -> int | None:
    match arguments.command:
        case "up":
            cluster.bring_up(arguments.profile)
        case "down":
            cluster.take_down()
        case "status":
            return _status()
        case "tools":
            for name in arguments.names or toolbox.TOOLS:
                print(toolbox.build(toolbox.tool_of(name)))
        case "prepare":
            print(requirements.unavailable() or cluster.prepare(arguments.profile))
        case "images":
            print(f"{images.ensure_pause()}\n{images.ensure_base()}")
        case "load":
            loading.load(
                [Path(item) if Path(item).exists() else item for item in arguments.items]
            )
        case "kubectl":
            program = str(toolbox.binary("kubectl"))
            os.execve(
                program,
                ["kubectl", *arguments.words],
                {**os.environ, "KUBECONFIG": str(KUBECONFIG)},
            )
    return None


def _status() -> int:
    reason = requirements.unavailable()
    if reason:
        print(reason)
        return 1
    if not state.exists():
        print("No bed is up. Start one: make cluster")
        return 1
    for box in (boxes.CONTROL, *(node.name for node in NODES)):
        if boxes.is_up(box):
            print(
                f"{box}: up, {len(cgroups.pids_below(box))} "
                f"processes{', frozen' if cgroups.is_frozen(box) else ''}"
            )
        else:
            print(f"{box}: not up")
    print(f"profile {state.read().profile}; KUBECONFIG={KUBECONFIG}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m bed",
        description="A real two-node Kubernetes on this machine, for tests.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser(
        "up", help="bring it up (some seconds once everything is built)"
    )
    commands.add_parser("down", help="take it down, whatever state it is in")
    commands.add_parser("status", help="what is up; exit code 1 where nothing is")
    tools = commands.add_parser(
        "tools", help="build programs (all by default) and print their folders"
    )
    tools.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(toolbox.TOOLS)}, or one of their programs",
    )
    prepare = commands.add_parser(
        "prepare",
        help="build all that `up` needs; where the bed cannot run, say why and do nothing",
    )
    for command in (up, prepare):
        command.add_argument(
            "--profile",
            choices=cluster.PROFILES,
            default="full",
            help="next: the control plane of a newer Kubernetes, with PodGroups; kwok: control plane and kwok only, "
            "no nodes",
        )
    commands.add_parser(
        "images", help="make the pause image and the base image where they are missing"
    )
    load = commands.add_parser(
        "load", help="load images of the bed's storage, or tars of images, into the nodes"
    )
    load.add_argument("items", nargs="+", metavar="IMAGE_OR_ARCHIVE")
    kubectl = commands.add_parser("kubectl", help="kubectl, as admin", add_help=False)
    kubectl.add_argument("words", nargs=argparse.REMAINDER)
    return parser


if __name__ == "__main__":
    sys.exit(main())
