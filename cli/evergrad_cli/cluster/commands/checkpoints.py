"""``evergrad checkpoints``: shows a run's newest checkpoint, where all checkpoints are, and how to list
them."""

import argparse
import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evergrad_cli.cluster.client.api_client import connect, core_path, find
from evergrad_cli.cluster.client.arguments import (
    add_cluster_arguments,
    add_run_name,
    given_place,
    say,
    say_json,
)
from evergrad_cli.cluster.client.errors import RefusedError
from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.commands.waiting import read_run
from evergrad_cli.cluster.render.runs import (
    LABEL_RUN,
    NODE,
    Run,
    newest_of_each,
    parse_pods,
)
from evergrad_cli.cluster.render.text import age, printable
from evergrad_common.contract import LABEL_PREFIX, VOLUME_PATH, ExitCode, RunFile

NAME = "checkpoints"
EXAMPLES = """\
  evergrad checkpoints docs-lm
  evergrad checkpoints docs-lm --json | jq .newestStep"""


@dataclass(frozen=True)
class Volume:
    """The claim with the run directory, as far as the user may read it.

    ``record`` is the operator's annotation about the run on the claim.
    """

    phase: str
    size: str
    record: Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add_run_name(parser)
    add_cluster_arguments(parser)


def execute(args: argparse.Namespace) -> int:
    """Show the checkpoints. Return 0, even for a run without a checkpoint."""
    with connect(args) as cluster:
        run = read_run(cluster, args.name)
        # If the user may not read the claim, the output names this, and the command continues.
        path = core_path("persistentvolumeclaims", cluster.namespace, run.claim)
        volume: Volume | None = None
        with contextlib.suppress(RefusedError):
            raw = find(cluster, path, what=f"persistentvolumeclaim {run.claim}")
            volume = (
                Volume("missing", "", {}) if raw is None else parse_volume(raw, run.name)
            )

        # Only a pod that mounts the volume can list the checkpoints.
        pod: str | None = None
        with contextlib.suppress(RefusedError):
            path, query = core_path("pods", cluster.namespace), f"{LABEL_RUN}={run.name}"
            items = cluster.items(path, what="pods", query={"labelSelector": query})
            pods = newest_of_each(parse_pods(items))
            pod = next(
                (one.name for one in pods if one.role == NODE and one.phase == "Running"),
                None,
            )
    args.namespace = args.namespace or run.namespace
    facts = document(run, volume, pod, place=given_place(args))
    if args.json:
        say_json(facts)
        return int(ExitCode.DONE)
    for line in render(facts, now=time.time()):
        say(line)
    return int(ExitCode.DONE)


def parse_volume(raw: Mapping[str, Any], run: str) -> Volume:
    """Return the part of a raw PersistentVolumeClaim that concerns ``run``."""
    # Each run has its own annotation, because several runs may have folders on one claim. A user may have
    # edited it.
    status, annotations = part(raw, "status"), part(raw, "metadata", "annotations")
    try:
        record = json.loads(annotations.get(f"run.{LABEL_PREFIX}{run}", "{}"))
    except ValueError:
        record = {}
    size = str(part(status, "capacity").get("storage", ""))
    return Volume(
        str(status.get("phase", "")), size, record if isinstance(record, Mapping) else {}
    )


def document(
    run: Run, volume: Volume | None, pod: str | None, *, place: str
) -> dict[str, Any]:
    """Return all known facts as one JSON document.

    ``pod``: a running pod that mounts the volume. ``place``: the result of ``given_place``, with the
    namespace.
    """
    # The record on the claim outlives the run's object, so it may have a completion that the status of a new
    # object lacks.
    complete = volume.record.get("complete") if volume is not None else None
    step = run.checkpoint_step
    if isinstance(complete, Mapping) and isinstance(complete.get("step"), int):
        step = max(step or 0, complete["step"])
    folder = (
        str(volume.record.get("path") or run.folder) if volume is not None else run.folder
    )
    directory = f"{VOLUME_PATH}/{folder}"
    healthy = run.condition("CheckpointHealthy")
    return {
        "name": run.name,
        "newestStep": step,
        "savedAt": run.checkpoint_at,
        "step": run.step,
        "stepsSince": None if run.step is None or step is None else max(0, run.step - step),
        "healthy": None
        if healthy is None or healthy.status == "Unknown"
        else healthy.status == "True",
        "message": (healthy.message or healthy.reason) if healthy is not None else None,
        "complete": bool(complete) or run.is_true("Complete"),
        "claim": run.claim,
        "claimPhase": volume.phase if volume is not None else None,
        "claimSize": (volume.size or None) if volume is not None else None,
        "folder": folder,
        "directory": f"{directory}/{RunFile.CHECKPOINTS}",
        "listCommand": None
        if pod is None
        else (
            f"kubectl exec {pod}{place} -- ls -l --time-style=long-iso "
            f"{directory}/{RunFile.CHECKPOINTS}"
        ),
    }


def render(facts: Mapping[str, Any], *, now: float) -> list[str]:
    """Return the document as lines of text. ``now`` in Unix seconds."""
    # Show the newest checkpoint first: progress after it would be lost if the run stopped now.
    newest = "none known" if facts["newestStep"] is None else f"step {facts['newestStep']}"
    if facts["savedAt"] is not None:
        newest += f", {age(now - facts['savedAt'])} ago"
    if facts["stepsSince"]:
        newest += f"; {facts['stepsSince']} steps since"
    claim = f"{facts['claim']}, folder {facts['folder']}"
    if facts["claimPhase"] is None:
        claim += " (this user may not read claims)"
    else:
        claim += f" ({', '.join(str(part) for part in (facts['claimPhase'], facts['claimSize']) if part)})"

    # Then show its place, and last a command for the other checkpoints, which only a pod with the volume can
    # run.
    lines = [
        f"Newest:     {newest}",
        f"Claim:      {claim}",
        f"Directory:  {facts['directory']} in each pod",
    ]
    if facts["message"]:
        lines.insert(1, f"Health:     {facts['message']}")
    if facts["complete"]:
        lines.append("Complete:   yes")
    if facts["listCommand"]:
        lines += ["", f"To list them all: {facts['listCommand']}"]
    else:
        lines += [
            "",
            (
                "No pod of the run has the volume now. To list them, mount the claim: evergrad "
                "checkpoint list DIRECTORY"
            ),
        ]
    return [printable(line) for line in lines]
