"""Wiring of a task's sources into the stream and the sets that the loop reads."""

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
    """The data of a run. ``fingerprint`` is the training stream's.

    ``exhausted_after``: samples after which a horizon that ends by its sources ends; None for any other.
    """

    train: TrainingStream
    evaluation: tuple[EvaluationSet, ...]
    fingerprint: str
    exhausted_after: int | None = None

    def derive_steps(self, training: Training) -> HorizonNumbers:
        """The run's length over these data. Raises ConfigurationError."""
        return derive_steps(
            training,
            num_samples=self.train.num_samples,
            exhausted_after=self.exhausted_after,
            steps_before=self.train.first_step - 1,
        )

    def starting_at(self, start: DataStart, training: Training) -> "DataStreams":
        """The same data, begun where another run has left its own. Raises ConfigurationError."""
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
    """The training stream over ``stages``, and the named sets to evaluate on.

    Raises ConfigurationError for a weight that is too small.
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
    """Samples after which a horizon that ends by its sources ends; None for any other."""
    if training.horizon.exhausted is None:
        return None
    epochs = Fraction(repr(training.horizon.epochs or 0.0))
    return train.exhausted_after(epochs, training.horizon.exhausted)
