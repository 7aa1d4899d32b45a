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

    ``wait`` waits for some time, and returns whether this process was requested to stop, which ends the
    iteration. ``warn`` receives a message for each checkpoint that cannot be evaluated, because it is damaged
    or was removed. Raises CutError if a stop interrupts an evaluation.
    """
    done: set[tuple[str, str]] = set()
    while True:
        # Read the mark before the list of checkpoints, so that the list contains all checkpoints before the
        # mark.
        is_complete = directory.is_complete()
        # Compare manifests, too, because an earlier checkpoint may have had the same name.
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
        # Evaluate one checkpoint at a time: meanwhile, retention continues and newer checkpoints may arrive.
        candidate, key = waiting[0]
        done.add(key)
        if candidate.manifest is None:
            warn(f"{candidate.name} cannot be read: {candidate.reason}")
            continue
        try:
            yield from evaluator.evaluate(candidate)
        except CheckpointError as error:
            if candidate.name in {one.name for one in list_checkpoints(evaluator.store)}:
                warn(f"{candidate.name} is skipped: {error}")
            else:
                warn(
                    f"{candidate.name} was retired before it could be evaluated; raise "
                    "spec.training.checkpoint.keep to evaluate each checkpoint"
                )
