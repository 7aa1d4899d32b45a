"""The PVC of a run: a new one, or the run's record on an existing one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from evergrad_operator.core.objects import names
from evergrad_operator.core.objects.config import Config
from evergrad_operator.core.observe.observe import ClaimState, VolumeRecord, build_record
from evergrad_operator.core.observe.spec import ParsedRun
from evergrad_operator.core.plan.common import (
    JsonObject,
    build_metadata,
    pass_labels,
    without_none,
)

KEPT_RECORDS: Final = 100
"""Number of records of runs that are gone: such a record keeps a folder from other runs, and a run that is
applied again from training twice.

A record has some 300 bytes, and all annotations of an object have 256 KiB: the newest hundred take an eighth
of that.
"""


@dataclass(frozen=True)
class StaleRecords:
    """Records to remove from a PVC.

    ``annotations``: their names. ``dropped_unfinished``: the number of records of unfinished runs that were
    ever removed, these included; None if it does not change. ``resource_version``: of the PVC that was
    counted.
    """

    annotations: tuple[str, ...] = ()
    dropped_unfinished: int | None = None
    resource_version: str = ""


NOTHING_STALE: Final = StaleRecords()


def find_stale_records(
    run: ParsedRun, claim: ClaimState | None, users: frozenset[str] | None
) -> StaleRecords:
    """Find the records to remove: those of runs that are gone, beyond the number that has room.

    Nothing is removed if the users of the claim are not known.
    """
    if claim is None or users is None:
        return NOTHING_STALE
    gone = [
        record
        for record in claim.records.values()
        if record.run not in users and record.run != run.name
    ]

    # Records of complete runs go first, each kind from the oldest on. The record of an unfinished run says
    # that its only checkpoints are on the claim: `evergrad prune` would otherwise delete them.
    gone.sort(
        key=lambda record: (record.complete is None, record.created_at, record.run),
        reverse=True,
    )
    stale = gone[KEPT_RECORDS:]
    unfinished = sum(record.complete is None for record in stale)
    return StaleRecords(
        tuple(names.claim_annotation(record.run) for record in stale),
        claim.dropped_unfinished + unfinished if unfinished else None,
        claim.resource_version,
    )


def build_claim(
    run: ParsedRun,
    record: VolumeRecord | None,
    config: Config,
    live: ClaimState | None,
    *,
    is_owned: bool,
) -> JsonObject | None:
    """Build the claim to apply, by ``names.claim_field_manager``; None where the PVC is as it should be
    already, or is the user's and missing.

    ``record``: None leaves the one that the PVC has of this run. ``is_owned``: it goes with the run.
    """
    key = names.claim_annotation(run.name)
    present = live.annotations.get(key, "") if live is not None else ""
    text = build_record(record) if record is not None else present
    annotations = {key: text}
    # The annotation says what was applied last. An owner that somebody has added or removed by hand stays so.
    if is_owned:
        annotations[names.ANNOTATION_DELETED_WITH] = run.uid
    mark = live.annotations.get(names.ANNOTATION_DELETED_WITH) if live is not None else None
    if not text or (text == present and (mark == run.uid) == is_owned):
        return None
    claim: JsonObject = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}

    # Only our annotation is applied to a claim that the user made, also to one with the run's own name.
    if run.spec.storage.claim_name is not None or (live is not None and not live.is_ours):
        metadata = {
            "name": run.claim_name,
            "namespace": run.namespace,
            "annotations": annotations,
        }
        return None if live is None else {**claim, "metadata": metadata}

    # Whom it was made for is written once. An apply without it would take it off.
    made_for = run.uid
    if live is not None:
        made_for = live.annotations.get(names.ANNOTATION_MADE_FOR, "")
    if made_for:
        annotations[names.ANNOTATION_MADE_FOR] = made_for

    # By default a claim of the run's own has no owner: data outlives the run.
    metadata = {
        **build_metadata(run, run.claim_name, is_owned=is_owned),
        "annotations": annotations,
    }
    # One that exists is applied with the spec that it has, because most of it never changes.
    if live is not None:
        return pass_labels(
            {**claim, "metadata": metadata, "spec": dict(live.spec)}, run, config
        )
    storage = run.spec.storage
    size = storage.size or config.default_storage_size
    spec = without_none(
        {
            "accessModes": list(choose_access_modes(run, config, None)),
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage.storage_class_name or config.default_storage_class,
        }
    )
    return pass_labels({**claim, "metadata": metadata, "spec": spec}, run, config)


def build_record_alone(claim: Mapping[str, Any]) -> JsonObject:
    """Return what is applied to a claim that somebody else has made: the run's record, and nothing else."""
    metadata = claim["metadata"]
    records = {
        key: value
        for key, value in metadata["annotations"].items()
        if key.startswith(names.CLAIM_ANNOTATION_PREFIX)
    }
    kept = {key: metadata[key] for key in ("name", "namespace")}
    return {
        "apiVersion": claim["apiVersion"],
        "kind": claim["kind"],
        "metadata": {**kept, "annotations": records},
    }


def choose_access_modes(
    run: ParsedRun, config: Config, live: ClaimState | None
) -> tuple[str, ...]:
    """Return the access modes of the volume that exists (``live``), else those that are asked for."""
    if live is not None and (modes := live.spec.get("accessModes")):
        return tuple(modes)
    if run.spec.storage.access_modes:
        return run.spec.storage.access_modes
    if config.storage_access_mode:
        return (config.storage_access_mode,)
    return ("ReadWriteOnce" if run.spec.nodes.largest == 1 else "ReadWriteMany",)


def is_for_one_host(run: ParsedRun, config: Config, live: ClaimState | None) -> bool:
    """Whether several pods share a volume that only one node of the cluster can mount at a time."""
    modes = choose_access_modes(run, config, live)
    return run.spec.nodes.largest > 1 and "ReadWriteMany" not in modes
