"""From prepared data to what the loop reads."""

from dataclasses import dataclass

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import HELD_OUT, Training
from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.prepared import Prepared, TokenSequence
from evergrad_trainer.data.stream import Batching, TrainingStream
from evergrad_trainer.data.tokenizers import TextTokenizer
from evergrad_trainer.errors import DataError


@dataclass(frozen=True)
class Data:
    """Everything a run reads. ``fingerprint`` is the training stream's."""

    train: TrainingStream
    evaluation: tuple[EvaluationSet, ...]
    fingerprint: str
    vocab_size: int


def build_data(training: Training, prepared: Prepared, tokenizer: TextTokenizer) -> Data:
    """The training stream, and the evaluation sets: first the held-out split, if there is one, then the manifest's own.

    Raises DataError if the data was prepared with another tokenizer, and ConfigurationError for a weight that is too small.
    """
    if prepared.tokenizer_identity != tokenizer.identity:
        what = f"the data was prepared with the tokenizer {prepared.tokenizer_identity}"
        raise DataError(
            Problem(
                "spec.training.tokenizer", what, f"this one is {tokenizer.identity}", "Prepare the data again"
            )
        )
    batching = Batching(
        global_batch_size=training.batching.global_batch_size,
        micro_batch_size=training.batching.micro_batch_size,
        sequence_length=training.data.sequence_length,
    )
    train = TrainingStream(
        prepared.sources,
        weights=[source.weight for source in training.data.sources],
        seed=training.reproducibility.seed,
        batching=batching,
        end_of_document=tokenizer.end_of_document,
        tokenizer_identity=tokenizer.identity,
    )
    named: list[tuple[str, list[TokenSequence]]] = []
    held_out = [source.held_out for source in prepared.sources if source.held_out is not None]
    if held_out:
        named.append((HELD_OUT, held_out))
    named.extend((source.name, [source.train]) for source in prepared.evaluation)
    evaluation = tuple(
        EvaluationSet(
            name,
            sequences,
            sequence_length=batching.sequence_length,
            micro_batch_size=batching.micro_batch_size,
            end_of_document=tokenizer.end_of_document,
            limit=training.evaluation.samples,
        )
        for name, sequences in named
    )
    return Data(
        train=train, evaluation=evaluation, fingerprint=train.fingerprint, vocab_size=tokenizer.vocab_size
    )
