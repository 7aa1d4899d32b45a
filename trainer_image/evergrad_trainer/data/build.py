"""Builds the training stream and the evaluation sets from a task's sources."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from evergrad_manifest.derive import HorizonNumbers, derive_steps
from evergrad_manifest.training import Training
from evergrad_trainer.data.batch import Source, Stage
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.start_positions import DataStart
from evergrad_trainer.data.stream import BatchShape, TrainingStream


@dataclass(frozen=True)
class DataStreams:
    """The data of a run.

    ``fingerprint``: the fingerprint of the training stream. ``exhausted_after``: number of samples after
    which the run ends, if its horizon depends on exhausted sources; else None.
    """

    train: TrainingStream
    evaluation: tuple[EvaluationSet, ...]
    fingerprint: str
    exhausted_after: int | None = None

    def derive_steps(self, training: Training) -> HorizonNumbers:
        """Return the length of the run with these data. Raises ConfigurationError if it is not valid."""
        return derive_steps(
            training,
            num_samples=self.train.num_samples,
            exhausted_after=self.exhausted_after,
            steps_before=self.train.first_step - 1,
        )

    def starting_at(self, start: DataStart, training: Training) -> "DataStreams":
        """Return the same data, starting at the position of another run.

        Raises ConfigurationError if there are several stages.
        """
        train = self.train.starting_at(start)
        return replace(
            self,
            train=train,
            fingerprint=train.fingerprint,
            exhausted_after=_find_end(train, training),
        )


def build_data(
    training: Training, stages: Sequence[Stage], evaluation: Mapping[str, Sequence[Source]]
) -> DataStreams:
    """Build the training stream over ``stages``, and the named evaluation sets.

    Raises ConfigurationError if a weight is too small.
    """
    batching = BatchShape(
        global_batch_size=training.batching.global_batch_size,
        micro_batch_size=training.batching.micro_batch_size,
        overfits=training.data.overfit_first_batch,
    )
    train = TrainingStream(
        stages, seed=training.reproducibility.seed_of_data, batching=batching
    )
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
    return DataStreams(
        train=train,
        evaluation=sets,
        fingerprint=train.fingerprint,
        exhausted_after=_find_end(train, training),
    )


def _find_end(train: TrainingStream, training: Training) -> int | None:
    """Return the number of samples after which the horizon ends; None if it does not depend on sources."""
    if training.horizon.exhausted is None:
        return None
    epochs = Fraction(repr(training.horizon.epochs or 0.0))
    return train.exhausted_after(epochs, training.horizon.exhausted)
