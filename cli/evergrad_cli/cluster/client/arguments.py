"""The arguments that commands for a cluster share: which cluster, which namespace, which run, and
``--json``."""

import argparse
import difflib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any, Final, TextIO

from evergrad_cli.cluster.client.errors import ClusterInputError
from evergrad_manifest.errors import Problem

# kubectl prints a run under these names, so its output can be pasted.
_KINDS: Final = (
    "trun",
    "trainingrun",
    "trainingruns",
    "trainingruns.evergrad.dev",
    "trainingrun.evergrad.dev",
)
# This accepts more names than a file may have, because any name may exist on the cluster and can be looked
# up.
_RUN_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,251}[a-z0-9])?")
_DURATION: Final = re.compile(
    r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?"
)


def add_cluster_arguments(
    parser: argparse.ArgumentParser, *, json_help: str = "print one JSON document"
) -> None:
    """Define ``--namespace``, ``--context``, ``--kubeconfig`` and ``--json``."""
    parser.add_argument(
        "-n",
        "--namespace",
        metavar="NAMESPACE",
        help="namespace of the run (default: the namespace of the context)",
    )
    parser.add_argument(
        "--context",
        metavar="NAME",
        help="context of the kubeconfig (default: the current context)",
    )
    parser.add_argument(
        "--kubeconfig",
        metavar="FILE",
        type=Path,
        help="kubeconfig to use (default: $KUBECONFIG, or ~/.kube/config)",
    )
    parser.add_argument("--json", action="store_true", help=json_help)


def given_place(args: argparse.Namespace) -> str:
    """Return the options of ``args`` that name the cluster and the namespace, for commands in advice.

    Each option has a space before it. Empty if no option was given.
    """
    # Without these options, the command in the advice would act on a run of the same name in the current
    # context.
    given = (
        ("-n", args.namespace),
        ("--context", args.context),
        ("--kubeconfig", args.kubeconfig),
    )
    return "".join(
        f" {option} {shlex.quote(str(value))}" for option, value in given if value
    )


def add_run_name(parser: argparse.ArgumentParser) -> None:
    """Define the argument with the name of the run."""
    parser.add_argument(
        "name",
        type=run_name,
        metavar="NAME",
        help="name of the run, also as trun/NAME",
    )


def add_all_namespaces(parser: argparse.ArgumentParser) -> None:
    """Define ``-A``."""
    parser.add_argument(
        "-A",
        "--all-namespaces",
        action="store_true",
        help="include the runs of all namespaces",
    )


def add_timeout(parser: argparse.ArgumentParser, *, default: str) -> None:
    """Define ``--timeout``: a float in seconds, infinity for 0."""
    parser.add_argument(
        "--timeout",
        type=seconds_of,
        default=seconds_of(default),
        metavar="TIME",
        help=(
            f"time limit, such as 90s, 30m or 2h, with exit code 124; 0: no limit (default: {default})"
        ),
    )


def is_run_directory(text: str) -> bool:
    """Return whether an argument is a run directory of this machine, not the name of a run on the cluster.

    A path that does not exist is an error, because the name of a run cannot contain a slash. Raises
    ClusterInputError.
    """
    directory = Path(text)
    if directory.is_dir():
        return True
    kind, slash, _ = text.rstrip("/").rpartition("/")
    if not slash or kind.lower() in _KINDS:
        return False
    near = directory.parent
    there = (
        sorted(one.name for one in near.iterdir() if one.is_dir()) if near.is_dir() else []
    )
    remedy = "Name the directory of a run, such as runs/docs-lm, or a run on the cluster by its name"
    if close := difflib.get_close_matches(directory.name, there, n=1):
        remedy = f"Did you mean {near / close[0]}? {remedy}"
    raise ClusterInputError(
        Problem(text, "no such directory exists on this machine", "", remedy)
    )


def require_run_name(text: str) -> str:
    """Return the name of a run on the cluster, parsed by ``run_name``. Raises ClusterInputError."""
    try:
        return run_name(text)
    except argparse.ArgumentTypeError as error:
        raise ClusterInputError(Problem("NAME", str(error))) from None


def run_name(text: str) -> str:
    """Parse the name of a run: ``docs-lm`` or ``trun/docs-lm`` → ``docs-lm``. Raises ArgumentTypeError."""
    kind, slash, name = text.rpartition("/")
    if slash and kind.lower() not in _KINDS:
        why = (
            "" if Path(text).exists() else ", and no such directory exists on this machine"
        )
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the name of a run on the cluster{why}: write the name alone, or trun/NAME"
        )
    if _RUN_NAME.fullmatch(name) is None:
        raise argparse.ArgumentTypeError(
            f"{name!r} cannot be the name of a run: lower-case letters, digits and dashes"
        )
    return name


def seconds_of(text: str) -> float:
    """Parse a duration: ``90s``, ``30m``, ``1h30m`` or ``45`` → seconds; ``0`` → infinity. Raises
    ArgumentTypeError."""
    # Every part is optional, so an empty text matches, too.
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groups()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90s, 30m or 1h30m")
    hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return hours * 3600 + minutes * 60 + seconds or float("inf")


def say(text: str, *, file: TextIO | None = None) -> None:
    """Print ``text``. Characters that the terminal's encoding cannot show are escaped and never cause a
    traceback."""
    # Flush, so that a line is visible immediately even in a pipe: commands here wait minutes between lines.
    stream = sys.stdout if file is None else file
    encoding = stream.encoding or "utf-8"
    print(
        text.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True
    )


def note(text: str) -> None:
    """Print a remark for people to stderr, so that it is not mixed with the document of ``--json``."""
    say(text, file=sys.stderr)


def say_json(document: Any) -> None:
    """Print one JSON document to stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=True))
