"""Decides whether the run's folder on the volume belongs to another run."""

from evergrad_operator.core.objects.names import Phase, Reason
from evergrad_operator.core.observe.observe import overlap
from evergrad_operator.core.policies.context import ReconcileContext
from evergrad_operator.core.policies.record import (
    TRAIN_ON,
    find_longer_horizon,
    find_own_record,
    has_recipe,
)


def refuse_if_taken(context: ReconcileContext) -> ReconcileContext | None:
    """Return the context with the run failed if the folder is in use; None otherwise.

    The folder is in use if it contains the data of another run or another recipe, or a complete run with the
    same recipe and fewer steps. The older run keeps the folder.
    """
    run, own = context.run, find_own_record(context)
    text: str | None = None
    remedy = TRAIN_ON
    # A complete run never trains again. A run that is created again with more steps cannot continue it, and
    # must not be reported as complete, because the additional steps are missing.
    if own is not None and own.uid != run.uid and own.path == run.volume_path:
        steps = find_longer_horizon(context, own)
        if steps is not None and has_recipe(context, own):
            text = (
                f"{own.path} on PersistentVolumeClaim {run.claim_name} holds an earlier run {run.name}, "
                f"which is complete after step {steps[0]}, and this run asks for {steps[1]} steps"
            )

    if text is None:
        text = _find_conflict(context)
        remedy = "Choose another spec.storage.path in a new TrainingRun"
    if text is None:
        return None
    return context.finished(
        Phase.FAILED,
        Reason.OUTPUT_CONFLICT,
        f"{text}. {remedy}.",
    )


def _find_conflict(context: ReconcileContext) -> str | None:
    """Return a message about the other run that uses the folder, or None."""
    run, own, path = context.run, find_own_record(context), context.run.volume_path
    place = f"{path} on PersistentVolumeClaim {run.claim_name}"
    is_ours = own is not None and own.uid == run.uid
    age = (run.created_at, run.uid)
    if (
        own is not None
        and not is_ours
        and overlap(own.path, path)
        and run.parsed.is_whole  # an unreadable recipe cannot be compared
        and not has_recipe(context, own)
    ):
        return f"{place} holds the data of an earlier run {run.name} with another recipe"
    # Check the records on the volume, which also include deleted runs. Two runs that started at the same time
    # may both have written a record; the older run keeps the folder.
    claim = context.observation.claim
    for record in claim.records.values() if claim else ():
        if (
            record.run != run.name
            and overlap(record.path, path)
            and not (is_ours and age < (record.created_at, record.uid))
        ):
            return f"{place} holds the data of run {record.run}"
    # Check the list of runs for runs that have not written a record yet.
    for other in context.observation.others:
        if (
            not is_ours
            and not other.is_out
            and overlap(other.path, path)
            and (other.created_at, other.uid) < age
        ):
            return f"{place} belongs to run {other.name}, which is older"
    return None
