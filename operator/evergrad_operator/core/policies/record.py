"""The run's record on its volume: the one that the PVC has, and the one that it shall have. Pure."""

from typing import Final

from evergrad_operator.core.objects.names import claim_annotation
from evergrad_operator.core.objects.raw import NOTHING, get_int
from evergrad_operator.core.observe.observe import VolumeRecord, build_record
from evergrad_operator.core.policies.context import ReconcileContext

TRAIN_ON: Final = (
    "To train on, create a TrainingRun of another name and folder with spec.training.initFrom, or run "
    "`evergrad run --extend` where its volume is mounted"
)
"""The remedy where more steps are asked of a complete run."""


def find_own_record(context: ReconcileContext) -> VolumeRecord | None:
    """Return the PVC's record under this run's name, which an earlier run may have written."""
    claim = context.observation.claim
    return claim.records.get(context.run.name) if claim else None


def plan_record(context: ReconcileContext, epoch: int) -> VolumeRecord:
    """Return the record that the PVC shall have of this run."""
    run, own = context.run, find_own_record(context)
    return VolumeRecord(
        run=run.name,
        path=run.volume_path,
        recipe=context.memory.recipe_hash,
        epoch=epoch,
        uid=run.uid,
        created_at=run.created_at,
        complete=own.complete if own is not None and own.uid == run.uid else None,
    )


def has_recipe(context: ReconcileContext, record: VolumeRecord) -> bool:
    """Return whether a record is of this run's recipe, in meaning or, in a record of an older version, in
    spelling."""
    parsed = context.run.parsed
    known = {
        context.memory.recipe_hash,
        parsed.recipe_hash,
        parsed.spelling_hash,
    }
    return record.recipe in known


def find_longer_horizon(
    context: ReconcileContext, record: VolumeRecord
) -> tuple[int, int] | None:
    """Return the step after which a record's run was complete and the steps that this run asks for, if
    those are more."""
    done = get_int(record.complete or NOTHING, "step")
    wanted = context.run.parsed.total_steps
    if done is None or wanted is None or wanted <= done:
        return None
    return done, wanted


def is_recorded(context: ReconcileContext, record: VolumeRecord) -> bool:
    """Return whether the PVC has exactly this record."""
    claim = context.observation.claim
    if claim is None:
        return False
    return claim.annotations.get(claim_annotation(context.run.name)) == build_record(record)
