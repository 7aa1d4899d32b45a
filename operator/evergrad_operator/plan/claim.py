"""The PVC of a run: a new one, or the run's record on an existing one."""

from typing import Final

from evergrad_operator import names
from evergrad_operator.config import Config
from evergrad_operator.observe import ClaimState, Record, build_record
from evergrad_operator.plan.common import JsonObject, build_metadata, without_none
from evergrad_operator.spec import TrainingRun

KEPT_RECORDS: Final = 100
"""Records of runs that are gone: they keep a folder from other runs, and a run that is applied again from
training twice.

A record has some 300 bytes, and all annotations of an object have 256 KiB: the newest hundred take an eighth
of that.
"""


def find_stale_records(
    run: TrainingRun, claim: ClaimState | None, users: frozenset[str] | None
) -> tuple[str, ...]:
    """Annotations of the PVC to remove: the oldest records of runs that are gone.

    Nothing where the runs are not known.
    """
    if claim is None or users is None:
        return ()
    # Records of runs that are gone go from the oldest on, so that the annotations never reach their limit.
    gone = [
        record
        for record in claim.records.values()
        if record.run not in users and record.run != run.name
    ]
    gone.sort(key=lambda record: (record.created_at, record.run), reverse=True)
    return tuple(names.claim_annotation(record.run) for record in gone[KEPT_RECORDS:])


def build_claim(
    run: TrainingRun, record: Record, config: Config, live: ClaimState | None
) -> JsonObject | None:
    """Build what to apply, by ``names.claim_field_manager``; None where the PVC says so already, or is the
    user's and missing.

    A new PVC has no owner: data outlives the run. A claim that exists is applied with the spec that it has,
    because most of it never changes.
    """
    text = build_record(record)
    annotations = {names.claim_annotation(run.name): text}
    if live is not None and live.annotations.get(names.claim_annotation(run.name)) == text:
        return None
    claim: JsonObject = {"apiVersion": "v1", "kind": "PersistentVolumeClaim"}
    # Only our annotation is applied to a claim that the user made; it must exist already.
    if run.spec.storage.claim_name is not None:
        metadata = {
            "name": run.claim_name,
            "namespace": run.namespace,
            "annotations": annotations,
        }
        return None if live is None else {**claim, "metadata": metadata}
    metadata = {
        **build_metadata(run, run.claim_name, is_owned=False),
        "annotations": annotations,
    }
    if live is not None:
        return {**claim, "metadata": metadata, "spec": dict(live.spec)}
    storage = run.spec.storage
    size = storage.size or config.default_storage_size
    spec = without_none(
        {
            "accessModes": list(choose_access_modes(run, config, None)),
            "resources": {"requests": {"storage": size}},
            "storageClassName": storage.storage_class_name or config.default_storage_class,
        }
    )
    return {**claim, "metadata": metadata, "spec": spec}


def choose_access_modes(
    run: TrainingRun, config: Config, live: ClaimState | None
) -> tuple[str, ...]:
    """Those of the volume that stands (``live``); before it stands, those that are asked for."""
    if live is not None and (modes := live.spec.get("accessModes")):
        return tuple(modes)
    if run.spec.storage.access_modes:
        return run.spec.storage.access_modes
    return (
        config.storage_access_mode
        or ("ReadWriteOnce" if run.spec.nodes.largest == 1 else "ReadWriteMany"),
    )


def is_for_one_host(run: TrainingRun, config: Config, live: ClaimState | None) -> bool:
    """Whether several pods share a volume that only one node of the cluster can mount at a time."""
    return run.spec.nodes.largest > 1 and "ReadWriteMany" not in choose_access_modes(
        run, config, live
    )
