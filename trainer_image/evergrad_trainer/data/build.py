"""Wiring of a task's sources into the stream and the sets that the loop reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from evergrad_manifest.training import Training
from evergrad_trainer.data.batch import Source, Stage
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.stream import Batching, TrainingStream


@dataclass(frozen=True)
class Data:
    """The data of a run. ``fingerprint`` is the training stream's."""

    train: TrainingStream
    evaluation: tuple[EvaluationSet, ...]
    fingerprint: str


def build_data(
    training: Training, stages: Sequence[Stage], evaluation: Mapping[str, Sequence[Source]]
) -> Data:
    """The training stream over ``stages``, and the named sets to evaluate on.

    Raises ConfigurationError for a weight that is too small.
    """
    batching = Batching(
        global_batch_size=training.batching.global_batch_size,
        micro_batch_size=training.batching.micro_batch_size,
    )
    train = TrainingStream(stages, seed=training.reproducibility.seed, batching=batching)
    limits = {one.name: one.samples for one in training.evaluation.sets}
    sets = tuple(
        EvaluationSet(
            name,
            sources,
            micro_batch_size=batching.micro_batch_size,
            limit=limits.get(name) or training.evaluation.samples,
        )
        for name, sources in evaluation.items()
    )
    return Data(train=train, evaluation=sets, fingerprint=train.fingerprint)
