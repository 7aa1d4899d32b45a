"""Follows a run: evaluates each checkpoint as it is published, until the run is complete."""

from collections.abc import Callable, Iterator

from evergrad_trainer.base.errors import CheckpointError
from evergrad_trainer.evaluation.choice import list_checkpoints
from evergrad_trainer.evaluation.measurement import CheckpointEvaluator, Measured
from evergrad_trainer.run.directory import RunDirectory


def watch(
    evaluator: CheckpointEvaluator,
    directory: RunDirectory,
    *,
    wait: Callable[[], bool],
    warn: Callable[[str], None],
) -> Iterator[Measured]:
    """Yield each result of each checkpoint, the oldest checkpoint first.

    ``wait`` lets a while pass; it returns whether this process was asked to stop, which ends the iteration.
    ``warn`` is told of checkpoints that cannot be evaluated: damaged ones, and those that were retired first.
    Raises CutError in the middle of an evaluation.
    """
    done: set[tuple[str, str]] = set()
    while True:
        # Looked at before the checkpoints: whatever is published before the mark is among them.
        is_complete = directory.is_complete()
        # By its manifest, too: another checkpoint may have had its name before.
        waiting = [
            (one, key)
            for one in reversed(list_checkpoints(evaluator.store))
            if (key := (one.name, one.manifest.checksum if one.manifest else ""))
            not in done
        ]
        if not waiting:
            if is_complete or wait():
                return
            continue
        # One at a time: retention continues meanwhile, and newer ones may have come.
        candidate, key = waiting[0]
        done.add(key)
        if candidate.manifest is None:
            warn(f"{candidate.name} cannot be read: {candidate.reason}")
            continue
        try:
            yield from evaluator.evaluate(candidate)
        except CheckpointError as error:
            if candidate.name in {one.name for one in list_checkpoints(evaluator.store)}:
                warn(f"{candidate.name} is passed over: {error}")
            else:
                warn(
                    f"{candidate.name} was retired before it could be evaluated; raise "
                    "spec.training.checkpoint.keep if each is to be"
                )
