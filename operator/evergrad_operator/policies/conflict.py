"""Whether the folder of the volume belongs to somebody else."""

from evergrad_operator.names import Phase, Reason
from evergrad_operator.observe import Record, overlap
from evergrad_operator.policies.situation import Situation


def refuse_if_taken(situation: Situation) -> Situation | None:
    """The situation with the run failed, if another run or another recipe keeps its data there.

    The older run stays.
    """
    text = _find_conflict(situation)
    if text is None:
        return None
    remedy = "Choose another spec.storage.path in a new TrainingRun"
    return situation.finished(Phase.FAILED, Reason.OUTPUT_CONFLICT, f"{text}. {remedy}.")


def _find_conflict(situation: Situation) -> str | None:
    run, own, path = situation.run, situation.own_record, situation.run.volume_path
    place = f"{path} on PersistentVolumeClaim {run.claim_name}"
    is_ours = own is not None and own.uid == run.uid
    age = (run.created_at, run.uid)
    if (
        own is not None
        and not is_ours
        and overlap(own.path, path)
        and own.recipe != situation.build_record(0).recipe
    ):
        return f"{place} holds the data of an earlier run {run.name} with another recipe"
    claim = situation.observation.claim
    for record in claim.records.values() if claim else ():
        if (
            record.run != run.name
            and overlap(record.path, path)
            and not (is_ours and age < _age(record))
        ):
            return f"{place} holds the data of run {record.run}"
    for other in situation.observation.others:
        if (
            not is_ours
            and not other.is_out
            and overlap(other.path, path)
            and (other.created_at, other.uid) < age
        ):
            return f"{place} belongs to run {other.name}, which is older"
    return None


def _age(record: Record) -> tuple[float, str]:
    return record.created_at, record.uid
