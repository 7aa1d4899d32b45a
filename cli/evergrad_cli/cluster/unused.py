"""Claims without a run and runs that ended long ago, from raw objects of one namespace. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from evergrad_cli.cluster.raw import part
from evergrad_cli.cluster.runs import parse_run
from evergrad_cli.cluster.text import age, parse_time
from evergrad_cli.leftovers import Leftover
from evergrad_coordinator.contract import LABEL_PREFIX

Raw = Mapping[str, Any]
CLAIM: Final = "PersistentVolumeClaim"
RUN: Final = "TrainingRun"
OWN_CLAIMS: Final = f"app.kubernetes.io/managed-by=evergrad,{LABEL_PREFIX}run"
"""Selects the claims that an operator has made."""
_RECORD: Final = f"run.{LABEL_PREFIX}"


def find_unused_claims(
    claims: Iterable[Raw],
    runs: Sequence[Raw],
    pods: Iterable[Raw],
    *,
    older_than: float,
    now: float,
) -> tuple[Leftover, ...]:
    """Find claims of runs that are gone. All objects are of one namespace, and each list is whole.

    ``older_than``: seconds since the last run on a claim was complete. ``now``: Unix seconds.
    """
    wanted = {run.claim for run in map(parse_run, runs)} | {
        str(raw["metadata"]["name"]) for raw in runs
    }
    # A pod that has ended writes to its claims no more.
    mounted = {}
    for pod in pods:
        phase = part(pod, "status").get("phase")
        volumes = part(pod, "spec").get("volumes") or ()
        if phase in ("Succeeded", "Failed"):
            continue
        for volume in volumes:
            claim = part(volume, "persistentVolumeClaim").get("claimName")
            if claim:
                mounted[str(claim)] = pod

    found = []
    for raw in sorted(claims, key=lambda one: str(one["metadata"]["name"])):
        metadata = raw["metadata"]
        name = str(metadata["name"])
        # A claim that is being deleted goes by itself once no pod mounts it.
        if name in wanted or metadata.get("deletionTimestamp"):
            continue
        size = part(raw, "status", "capacity").get("storage", "")
        why, is_kept = _judge_claim(raw, older_than=older_than, now=now)
        if name in mounted:
            why, is_kept = f"pod {mounted[name]['metadata']['name']} mounts it", True
        found.append(_leftover(CLAIM, raw, why, is_kept=is_kept, size=str(size)))
    return tuple(found)


def find_old_runs(
    runs: Iterable[Raw], *, older_than: float, now: float
) -> tuple[Leftover, ...]:
    """Find runs that have ended for good, at least ``older_than`` seconds ago."""
    found = []
    for raw in runs:
        run = parse_run(raw)
        ended: float | None = None
        # An operator writes a condition once; the completion time may be missing beside it.
        for kind in ("Complete", "Failed"):
            condition = run.condition(kind)
            if condition is not None and condition.status == "True":
                ended = run.completed or condition.since
                break
        if not run.is_over or run.is_deleting or ended is None or now - ended < older_than:
            continue
        how = "complete" if run.is_true("Complete") else "failed"
        storage = part(raw, "spec").get("storage")
        takes_data = isinstance(storage, Mapping) and storage.get("whenDeleted") == "Delete"
        # A restart of a failed run goes on from its checkpoints.
        is_kept = takes_data and how == "failed"
        volume = f"claim {run.claim} stays"
        if takes_data:
            volume = f"its claim {run.claim} goes with it (storage.whenDeleted)"
        if is_kept:
            volume = f"{volume}, with checkpoints of a run that did not end well"
        why = f"{how} {age(now - ended)} ago; {volume}"
        found.append(_leftover(RUN, raw, why, is_kept=is_kept))
    return tuple(sorted(found, key=lambda one: one.name))


def _judge_claim(raw: Raw, *, older_than: float, now: float) -> tuple[str, bool]:
    """Return why a claim without a run goes or stays, and whether it stays."""
    if raw["metadata"].get("ownerReferences"):
        return "it has an owner, and goes with it", True
    # Several runs may have folders on one claim: it goes only when it is of use to none of them.
    records: dict[str, Any] = {}
    for key, text in (raw["metadata"].get("annotations") or {}).items():
        if key.startswith(_RECORD):
            try:
                records[key.removeprefix(_RECORD)] = json.loads(text)
            except ValueError:
                return f"the record of run {key.removeprefix(_RECORD)} cannot be read", True
    if not records:
        return "no run has left a record on it", True

    # The record of a run that was never complete stands beside its only checkpoints.
    newest = 0.0
    for name, record in sorted(records.items()):
        complete = record.get("complete") if isinstance(record, Mapping) else None
        at = parse_time(complete.get("at")) if isinstance(complete, Mapping) else None
        if at is None:
            # Whether it has saved any is known to the volume alone, which no command mounts.
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
