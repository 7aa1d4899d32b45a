"""Builds the PVC of a run: a new PVC, or the run's record on an existing PVC."""

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
"""Maximum number of records of deleted runs on a PVC.

Such a record protects a folder from other runs, and prevents a run that is applied again from training twice.
A record has about 300 bytes and all annotations of an object are limited to 256 KiB, so 100 records use an
eighth.
"""


@dataclass(frozen=True)
class StaleRecords:
    """Records to remove from a PVC.

    ``annotations``: names of the annotations. ``dropped_unfinished``: total number of removed records of
    unfinished runs, including these records; None if it does not change. ``resource_version``: version of the
    PVC on which this is based.
    """

    annotations: tuple[str, ...] = ()
    dropped_unfinished: int | None = None
    resource_version: str = ""


NOTHING_STALE: Final = StaleRecords()


def find_stale_records(
    run: ParsedRun, claim: ClaimState | None, users: frozenset[str] | None
) -> StaleRecords:
    """Return the records of deleted runs to remove, beyond the ``KEPT_RECORDS`` records to keep.

    Returns no records if the users of the claim are not known.
    """
    if claim is None or users is None:
        return NOTHING_STALE
    gone = [
        record
        for record in claim.records.values()
        if record.run not in users and record.run != run.name
    ]

    # Remove records of complete runs first, the oldest first. The record of an unfinished run prevents
    # `evergrad prune` from deleting the run's only checkpoints.
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
    """Build the claim to apply with the field manager ``names.claim_field_manager``.

    Returns None if the PVC is up to date, or if it is the user's PVC and does not exist. ``record``: None
    keeps the run's record on the PVC. ``is_owned``: the PVC is deleted with the run.
    """
    key = names.claim_annotation(run.name)
    present = live.annotations.get(key, "") if live is not None else ""
    text = build_record(record) if record is not None else present
    annotations = {key: text}
    # Compare the ownership with the annotation, which shows the last applied state. An owner reference that
    # was added or removed by hand therefore stays.
    if is_owned:
        annotations[names.ANNOTATION_DELETED_WITH] = run.uid
    mark = live.annotations.get(names.ANNOTATION_DELETED_WITH) if live is not None else None
    if not text or (text == present and (mark == run.uid) == is_owned):
        return None
    claim: JsonObject = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}

    # Apply only our annotations to a claim that the user created, even if it has the run's name.
    if run.spec.storage.claim_name is not None or (live is not None and not live.is_ours):
        metadata = {
            "name": run.claim_name,
            "namespace": run.namespace,
            "annotations": annotations,
        }
        return None if live is None else {**claim, "metadata": metadata}

    # Keep the uid of the run for which the claim was created. An apply without the annotation would remove
    # it.
    made_for = run.uid
    if live is not None:
        made_for = live.annotations.get(names.ANNOTATION_MADE_FOR, "")
    if made_for:
        annotations[names.ANNOTATION_MADE_FOR] = made_for

    # By default the run's claim has no owner, so that the data outlives the run.
    metadata = {
        **build_metadata(run, run.claim_name, is_owned=is_owned),
        "annotations": annotations,
    }
    # Apply an existing claim with its present spec, because most fields are immutable.
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
    """Return the object to apply to a claim that the operator did not create: only the run's record."""
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
    """Return the access modes of the existing claim (``live``), or else the requested access modes."""
    if live is not None and (modes := live.spec.get("accessModes")):
        return tuple(modes)
    if run.spec.storage.access_modes:
        return run.spec.storage.access_modes
    if config.storage_access_mode:
        return (config.storage_access_mode,)
    return ("ReadWriteOnce" if run.spec.nodes.largest == 1 else "ReadWriteMany",)


def is_for_one_host(run: ParsedRun, config: Config, live: ClaimState | None) -> bool:
    """Return whether several pods share a volume that only one host at a time can mount."""
    modes = choose_access_modes(run, config, live)
    return run.spec.nodes.largest > 1 and "ReadWriteMany" not in modes
