"""Finds claims without a run, and runs that ended long ago, in raw objects of one namespace. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from evergrad_cli.cluster.client.raw import part
from evergrad_cli.cluster.render.runs import parse_run
from evergrad_cli.cluster.render.text import age, parse_time
from evergrad_cli.local.leftovers import Leftover
from evergrad_common.contract import LABEL_PREFIX
from evergrad_manifest.model.claims import (
    DROPPED_UNFINISHED,
    RECORD_PREFIX,
    claims_of,
    mounted_claims,
)

Raw = Mapping[str, Any]
CLAIM: Final = "PersistentVolumeClaim"
RUN: Final = "TrainingRun"
OWN_CLAIMS: Final = f"app.kubernetes.io/managed-by=evergrad,{LABEL_PREFIX}run"
"""Selects the claims that an operator created."""


def find_unused_claims(
    claims: Iterable[Raw],
    runs: Sequence[Raw],
    pods: Iterable[Raw],
    *,
    older_than: float,
    now: float,
) -> tuple[Leftover, ...]:
    """Return the claims of runs that no longer exist. All objects are from one namespace, and each list is
    complete.

    ``older_than``: minimum seconds since the last run on a claim was complete. ``now``: Unix seconds.
    """
    # A run needs the claims that it names even if it has no pod: it may be suspended, wait in a queue, or be
    # between two pods.
    kept_for: dict[str, str] = {}
    wanted = set()
    for run in runs:
        name = str(run["metadata"]["name"])
        named = claims_of(run)
        wanted |= {name, named.storage}
        for claim in named.mounted:
            kept_for.setdefault(claim, f"run {name} mounts it")
    # A pod that has ended no longer writes to its claims.
    for pod in pods:
        if part(pod, "status").get("phase") not in ("Succeeded", "Failed"):
            for claim in mounted_claims(part(pod, "spec")):
                kept_for[claim] = f"pod {pod['metadata']['name']} mounts it"

    found = []
    for raw in sorted(claims, key=lambda one: str(one["metadata"]["name"])):
        metadata = raw["metadata"]
        name = str(metadata["name"])
        # Kubernetes removes a claim that is being deleted when no pod mounts it.
        if name in wanted or metadata.get("deletionTimestamp"):
            continue
        size = part(raw, "status", "capacity").get("storage", "")
        why, is_kept = _judge_claim(raw, older_than=older_than, now=now)
        if name in kept_for:
            why, is_kept = kept_for[name], True
        found.append(_leftover(CLAIM, raw, why, is_kept=is_kept, size=str(size)))
    return tuple(found)


def find_old_runs(
    runs: Iterable[Raw], *, older_than: float, now: float
) -> tuple[Leftover, ...]:
    """Return the runs that ended for good at least ``older_than`` seconds ago."""
    found = []
    runs = list(runs)
    users: dict[str, str] = {}
    for raw in runs:
        for claim in claims_of(raw).all - {str(raw["metadata"]["name"])}:
            users.setdefault(claim, str(raw["metadata"]["name"]))
    for raw in runs:
        run = parse_run(raw)
        ended: float | None = None
        # An operator writes a condition once. The completion time may be missing even if the condition is
        # set.
        for kind in ("Complete", "Failed"):
            condition = run.condition(kind)
            if condition is not None and condition.status == "True":
                ended = run.completed or condition.since
                break
        if not run.is_over or run.is_deleting or ended is None or now - ended < older_than:
            continue
        how = "complete" if run.is_true("Complete") else "failed"
        # A restart of a failed run continues from its checkpoints.
        is_kept = run.takes_claim and how == "failed"
        volume = f"claim {run.claim} stays"
        if run.takes_claim:
            volume = f"its claim {run.claim} is deleted with it (storage.whenDeleted)"
        if is_kept:
            volume = f"{volume}, with checkpoints of a run that did not end well"
        elif run.takes_claim and run.claim in users:
            # The operator has not seen the other run yet, or has an older version.
            volume, is_kept = f"{volume}, and run {users[run.claim]} uses it", True
        why = f"{how} {age(now - ended)} ago; {volume}"
        found.append(_leftover(RUN, raw, why, is_kept=is_kept))
    return tuple(sorted(found, key=lambda one: one.name))


def _judge_claim(raw: Raw, *, older_than: float, now: float) -> tuple[str, bool]:
    """Return why a claim without a run is deleted or kept, and whether it is kept."""
    if raw["metadata"].get("ownerReferences"):
        return "it has an owner, and is deleted with it", True
    # Several runs may have folders on one claim. It is deleted only if none of them needs it.
    annotations = raw["metadata"].get("annotations") or {}
    records: dict[str, Any] = {}
    for key, text in annotations.items():
        if key.startswith(RECORD_PREFIX):
            name = key.removeprefix(RECORD_PREFIX)
            try:
                records[name] = json.loads(text)
            except ValueError:
                return f"the record of run {name} cannot be read", True
    # The operator had no room for their records. A value that is not a number counts, too.
    dropped = str(annotations.get(DROPPED_UNFINISHED, "0"))
    if dropped != "0":
        why = f"{dropped} runs without a record are gone and were not complete"
        return f"{why}: their checkpoints may be here", True
    if not records:
        return "no run has left a record on it", True

    # The record of a run that was never complete is next to its only checkpoints.
    newest = 0.0
    for name, record in sorted(records.items()):
        complete = record.get("complete") if isinstance(record, Mapping) else None
        at = parse_time(complete.get("at")) if isinstance(complete, Mapping) else None
        if at is None:
            # Only the volume shows whether the run has saved checkpoints, and no command mounts it.
            return (
                f"run {name} is gone and was not complete: it may have left checkpoints",
                True,
            )
        newest = max(newest, at)
    names = ", ".join(sorted(records))
    if now - newest < older_than:
        return f"run {names} was complete only {age(now - newest)} ago", True
    return f"run {names} is gone, and was complete {age(now - newest)} ago", False


def _leftover(kind: str, raw: Raw, why: str, *, is_kept: bool, size: str = "") -> Leftover:
    metadata = raw["metadata"]
    return Leftover(
        kind,
        str(metadata["name"]),
        why,
        is_kept=is_kept,
        size=size,
        namespace=str(metadata.get("namespace", "")),
        uid=str(metadata.get("uid", "")),
        version=str(metadata.get("resourceVersion", "")),
    )
