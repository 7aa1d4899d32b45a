"""The common part of suspend, resume and restart: patches one field of a run and, with ``--wait``, waits for
the effect."""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evergrad_cli.cluster.client.api_client import (
    FIELD_MANAGER,
    MERGE,
    Cluster,
    connect,
    runs_path,
)
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    add_run_name,
    add_timeout,
    note,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import ClusterInputError
from evergrad_cli.cluster.commands.waiting import Goal, read_run, wait_for
from evergrad_cli.cluster.render.runs import Run
from evergrad_common.contract import ExitCode
from evergrad_manifest.errors import Problem


@dataclass(frozen=True)
class Switch:
    """One change of a run: the patch and the goal of the wait."""

    verb: str
    """Past tense of the change, for example ``suspended``."""
    spec: dict[str, Any]
    goal: Goal
    is_done: Callable[[Run], bool]
    """Whether the run already has this change."""
    is_due: Callable[[Run], bool] = lambda run: True


def add_switch_arguments(parser: argparse.ArgumentParser, *, wait_help: str) -> None:
    """Define the name of the run, ``--wait`` and ``--timeout``."""
    add_run_name(parser)
    parser.add_argument("--wait", action="store_true", help=wait_help)
    add_timeout(parser, default="10m")
    add_cluster_arguments(parser)


def flip(
    args: argparse.Namespace,
    choose: Callable[[Run], Switch],
    *,
    check: Callable[[Run], Problem | None],
) -> int:
    """Make the change that ``choose`` returns for the current run, unless the run already has it.

    ``check`` returns the problem that forbids the change, or None. Return the exit code; with ``--wait``, the
    exit code of the wait.
    """
    with connect(args) as cluster:
        run = read_run(cluster, args.name)
        if (problem := check(run)) is not None:
            raise ClusterInputError(problem)

        # Do not repeat a change that is already made, so that the user may repeat the command.
        switch = choose(run)
        is_changed = not switch.is_done(run)
        if is_changed:
            patch_spec(cluster, args.name, switch.spec)
        text = f"trainingrun/{args.name} {switch.verb if is_changed else f'was {switch.verb} already'}"
        if not args.json:
            say(text)

        # The patch is only a request to the operator, so wait for its effect.
        code, message = int(ExitCode.DONE), text
        if args.wait:
            outcome, _ = wait_for(
                cluster, args.name, switch.goal, timeout=args.timeout, is_due=switch.is_due
            )
            code, message = int(outcome.exit_code or 0), outcome.text
            if not args.json:
                (say if code == 0 else note)(f"trainingrun/{args.name} {message}")
    if args.json:
        say_json(
            {"name": args.name, "changed": is_changed, "exitCode": code, "message": message}
        )
    return code


def new_nonce() -> str:
    """Return a value of spec.restartNonce that no run has had before: the time in microseconds."""
    # Use the time and not a random text, because the status shows the nonce and users read it.
    now = time.time()
    return (
        time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1e6):06d}Z"
    )


def patch_spec(cluster: Cluster, name: str, spec: dict[str, Any]) -> None:
    """Merge ``spec`` into the run's spec."""
    # Use a merge patch: server-side apply would remove every field that submit has set and this change does
    # not name.
    path = runs_path(cluster.namespace, name)
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
    cluster.send(
        "PATCH",
        path,
        {"spec": spec},
        what=f"trainingrun {name}",
        content_type=MERGE,
        query=query,
    )


def finished(run: Run, verb: str, place: str) -> Problem | None:
    """Return the problem of a run that has ended and therefore cannot ``verb``, or None.

    ``place``: the result of ``given_place``.
    """
    if not run.is_over:
        return None
    how = "is complete" if run.is_true("Complete") else "has failed"
    again = f"To try it again: evergrad restart {run.name}{place}"
    remedy = "" if run.is_true("Complete") else again
    return Problem(
        f"trainingrun {run.name}", f"{how}; there is nothing to {verb}", "", remedy
    )
