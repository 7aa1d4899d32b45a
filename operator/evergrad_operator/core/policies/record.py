"""Reads and plans the run's record on its PVC. Pure."""

from typing import Final

from evergrad_operator.core.objects.names import claim_annotation
from evergrad_operator.core.objects.raw import NOTHING, get_int
from evergrad_operator.core.observe.observe import VolumeRecord, build_record
from evergrad_operator.core.policies.context import ReconcileContext

TRAIN_ON: Final = (
    "To train further, create a TrainingRun with another name and folder with spec.training.initFrom, or run "
    "`evergrad run --extend` where its volume is mounted"
)
"""Remedy if a user requests more steps of a complete run."""


def find_own_record(context: ReconcileContext) -> VolumeRecord | None:
    """Return the PVC's record under this run's name, or None. An earlier run may have written it."""
    claim = context.observation.claim
    return claim.records.get(context.run.name) if claim else None


def plan_record(context: ReconcileContext, epoch: int) -> VolumeRecord:
    """Return the record that the PVC should contain for this run."""
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
    """Return whether a record contains the hash of this run's recipe.

    Records of older versions contain the hash of the recipe's text instead of its meaning.
    """
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
    """Return the last step of a complete run and the steps of this run, if this run has more; None
    otherwise."""
    done = get_int(record.complete or NOTHING, "step")
    wanted = context.run.parsed.total_steps
    if done is None or wanted is None or wanted <= done:
        return None
    return done, wanted


def is_recorded(context: ReconcileContext, record: VolumeRecord) -> bool:
    """Return whether the PVC contains exactly this record."""
    claim = context.observation.claim
    if claim is None:
        return False
    return claim.annotations.get(claim_annotation(context.run.name)) == build_record(record)
