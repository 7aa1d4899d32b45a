"""``evergrad prune``: lists leftovers of deleted or complete runs, and deletes them with ``--yes``."""

import argparse
import re
import time
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import Final

from evergrad_cli.cluster.client.api_client import Cluster, connect, core_path, runs_path
from evergrad_cli.cluster.client.arguments import (
    add_all_namespaces,
    add_cluster_arguments,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import ClusterInputError, NotFoundError
from evergrad_cli.cluster.commands.unused_objects import (
    CLAIM,
    OWN_CLAIMS,
    find_old_runs,
    find_unused_claims,
)
from evergrad_cli.cluster.render.text import NOTHING, table
from evergrad_cli.local.leftovers import Leftover, find_leftovers, find_runs, remove
from evergrad_common.contract import ExitCode
from evergrad_common.text import size
from evergrad_manifest.errors import EvergradError, Problem

NAME = "prune"
EXAMPLES = """\
  evergrad prune                                   # list claims whose run is deleted
  evergrad prune --older-than 30d                  # also runs that ended more than 30 days ago
  evergrad prune --older-than 30d --yes            # delete them
  evergrad prune runs/ --keep 1 --yes              # delete old checkpoints of this machine"""
_NUMBER = r"(\d+(?:\.\d+)?)"
_AGE: Final = re.compile(
    rf"(?=\d)(?:{_NUMBER}d)?(?:{_NUMBER}h)?(?:{_NUMBER}m)?(?:{_NUMBER}s)?"
)
_BARE_NUMBER: Final = re.compile(_NUMBER)
_ANY_AGE: Final = re.compile(r"0+(\.0+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    parser.add_argument(
        "directory",
        nargs="?",
        type=Path,
        metavar="DIRECTORY",
        help="a run directory on this machine, or a folder of run directories (default: use the cluster)",
    )
    parser.add_argument(
        "--older-than",
        type=_age_of,
        metavar="TIME",
        help="also list runs that ended before this time, such as 30d or 12h, and only claims of such runs",
    )
    parser.add_argument(
        "--keep",
        type=int,
        default=2,
        metavar="N",
        help="number of the newest checkpoints to keep in a directory (default: 2, at least 1)",
    )
    parser.add_argument(
        "--yes",
        action="store_true",
        help="delete the listed objects (default: only list them)",
    )
    add_all_namespaces(parser)
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """List or delete leftovers. Return 0, even if nothing is left over, or 70 if something could not be
    deleted."""
    if args.keep < 1:
        why = "the newest checkpoint of a run is never removed"
        raise ClusterInputError(
            Problem("--keep", f"{args.keep} is below 1", why, "Use 1 or more")
        )
    if args.directory is not None:
        return _prune_directory(args)
    return _prune_cluster(args)


def _prune_directory(args: argparse.Namespace) -> int:
    runs = find_runs(args.directory)
    if not runs:
        raise ClusterInputError(
            Problem(
                str(args.directory),
                "holds no run",
                "there is no run.json in it, or in a folder of it",
                "Name a run directory, or the folder of several",
            )
        )
    # A run next to this folder may have started from a checkpoint in this folder.
    around = {*runs, *find_runs(args.directory.resolve().parent)}
    now = time.time()
    found = [
        one
        for run in runs
        for one in find_leftovers(run, keep=args.keep, now=now, neighbours=around)
    ]
    return _finish(args, found, lambda one: remove(Path(one.name)))


def _prune_cluster(args: argparse.Namespace) -> int:
    with connect(args) as cluster:
        found = _look_at_cluster(
            cluster, None if args.all_namespaces else cluster.namespace, args.older_than
        )

        def delete(one: Leftover) -> None:
            path = (
                core_path("persistentvolumeclaims", one.namespace, one.name)
                if one.kind == CLAIM
                else runs_path(one.namespace, one.name)
            )
            # The preconditions keep the object if it was replaced or changed since it was listed.
            body = {
                "kind": "DeleteOptions",
                "apiVersion": "v1",
                "preconditions": {"uid": one.uid, "resourceVersion": one.version},
                "propagationPolicy": "Background",
            }
            cluster.send("DELETE", path, body, what=f"{one.kind.lower()} {one.name}")

        return _finish(args, found, delete)


def render(
    found: Sequence[Leftover], *, is_deleted: bool, failed: Container[Leftover] = ()
) -> list[str]:
    """Return the table and the line below it. ``failed``: leftovers that could not be deleted."""
    verb = "deleted" if is_deleted else "delete"
    rows = [
        [
            "keep" if one.is_kept else "failed" if one in failed else verb,
            one.kind,
            f"{one.namespace}/{one.name}" if one.namespace else one.name,
            one.size or (NOTHING if one.size_bytes is None else size(one.size_bytes)),
            one.why,
        ]
        for one in found
    ]
    going = [one for one in found if not one.is_kept]
    lines = table(("ACTION", "KIND", "NAME", "SIZE", "WHY"), rows)
    total = sum(one.size_bytes or 0 for one in going)
    freed = f", {size(total)}" if total else ""
    if going and not is_deleted:
        lines += ["", f"Nothing was deleted. {len(going)} would be{freed}: add --yes."]
    return lines


def _finish(
    args: argparse.Namespace, found: Sequence[Leftover], delete: Callable[[Leftover], None]
) -> int:
    """Delete the leftovers if ``--yes`` is set, and show all of them."""
    errors: dict[Leftover, str] = {}
    # If one leftover cannot be deleted, continue with the others, and report the error at the end.
    for one in found:
        if args.yes and not one.is_kept:
            try:
                delete(one)
            except NotFoundError:
                continue  # another client has deleted it
            except (OSError, EvergradError) as error:
                errors[one] = str(error)
    failures = [
        f"{one.kind} {one.name}: not deleted; {text}" for one, text in errors.items()
    ]
    if args.json:
        going = [_row(one, errors) for one in found if not one.is_kept]
        kept = [_row(one, errors) for one in found if one.is_kept]
        say_json(
            {"deleted": args.yes, "leftovers": going, "kept": kept, "failures": failures}
        )
    elif not found:
        note("Nothing is left over.")
    else:
        for line in render(found, is_deleted=args.yes, failed=errors):
            say(line)
    # Print errors to stderr below the list, so that --json stays one document.
    for text in failures:
        note(f"error: {text}")
    return int(ExitCode.INTERNAL if failures else ExitCode.DONE)


def _row(one: Leftover, errors: Mapping[Leftover, str]) -> dict[str, object]:
    return {
        "kind": one.kind,
        "name": one.name,
        "namespace": one.namespace or None,
        "why": one.why,
        "size": one.size or None,
        "bytes": one.size_bytes,
        "error": errors.get(one),
    }


def _look_at_cluster(
    cluster: Cluster, namespace: str | None, older_than: float | None
) -> list[Leftover]:
    # List claims before runs. A run that is created in between then keeps its claim; in the other order, the
    # claim would seem unused.
    selector = {"labelSelector": OWN_CLAIMS}
    claims = [
        *cluster.items(
            core_path("persistentvolumeclaims", namespace),
            what="persistentvolumeclaims",
            query=selector,
        )
    ]
    pods = [*cluster.items(core_path("pods", namespace), what="pods")]
    runs = [*cluster.items(runs_path(namespace), what="trainingruns")]
    # Judge a claim by the runs and pods of its own namespace, because names repeat in other namespaces.
    now = time.time()
    found: list[Leftover] = []
    for place in sorted({str(raw["metadata"]["namespace"]) for raw in (*claims, *runs)}):
        here = [raw for raw in runs if raw["metadata"]["namespace"] == place]
        if older_than is not None:
            found += find_old_runs(here, older_than=older_than, now=now)
        found += find_unused_claims(
            [raw for raw in claims if raw["metadata"]["namespace"] == place],
            here,
            [raw for raw in pods if raw["metadata"]["namespace"] == place],
            older_than=older_than or 0.0,
            now=now,
        )
    return found


def _age_of(text: str) -> float:
    """Parse an age: ``30d``, ``12h``, ``1d12h`` or ``0`` → seconds. Raises ArgumentTypeError."""
    # Older leftovers are deleted, so refuse a number without a unit instead of guessing the unit.
    given = text.strip()
    if _ANY_AGE.fullmatch(given):
        return 0.0
    match = _AGE.fullmatch(given)
    if match is None:
        is_number = _BARE_NUMBER.fullmatch(given) is not None
        what = f"{text!r} has no unit" if is_number else f"{text!r} is not an age"
        days = f"{given}d" if is_number else "30d"
        raise argparse.ArgumentTypeError(
            f"{what}; what is older is deleted. Write {days} for days, or use the units h and m; 0 is any age"
        )
    scales = (86400.0, 3600.0, 60.0, 1.0)
    parts = zip(match.groups(), scales, strict=True)
    return sum(float(part or 0) * scale for part, scale in parts)
