"""Evaluation sets: all samples once, or the same even choice of them."""

from pathlib import Path

import numpy as np
import pytest

from evergrad_trainer.data.evaluation_sets import EvaluationSet
from evergrad_trainer.data.prepared import PreparedSource, Shard, TokenSequence
from evergrad_trainer.data.token_source import IGNORE_INDEX, TokenSource


@pytest.fixture
def sequences(tmp_path: Path) -> list[TokenSequence]:
    """Tokens 0 to 99, and 1000 to 1049."""
    ranges = {"a": np.arange(100), "b": np.arange(1000, 1050)}
    for name, tokens in ranges.items():
        tokens.astype("<u2").tofile(tmp_path / name)
    return [
        TokenSequence("uint16", (Shard(tmp_path / name, 0, len(tokens)),))
        for name, tokens in ranges.items()
    ]


def build(
    sequences: list[TokenSequence],
    *,
    limit: int | None = None,
    batch: int = 4,
    content: str = "",
) -> EvaluationSet:
    sources = [
        TokenSource(
            PreparedSource("docs", Path(), "", content, one),
            one,
            sequence_length=10,
            end_of_document=256,
        )
        for one in sequences
    ]
    return EvaluationSet("heldOut", sources, micro_batch_size=batch, limit=limit)


@pytest.mark.capability("T-X11")
def test_every_token_is_predicted_exactly_once(sequences: list[TokenSequence]) -> None:
    one = build(sequences)
    batches = [one.batch(index) for index in range(one.num_batches)]
    assert (one.num_samples, one.num_batches) == (15, 4)
    assert {batch.tensors["input_ids"].shape for batch in batches} == {(4, 10)}, (
        "the last one is not filled up"
    )
    found = [
        label for batch in batches for label in batch.tensors["labels"].flatten().tolist()
    ]
    labels = [label for label in found if label != IGNORE_INDEX]
    assert labels == [*range(1, 100), *range(1001, 1050)]
    assert sum(batch.weight for batch in batches) == 148
    assert [len(batch.samples) for batch in batches] == [4, 4, 4, 3]


@pytest.mark.capability("C-28")
@pytest.mark.parametrize("limit", [None, 7])
def test_batches_of_another_size_have_the_same_samples_in_the_same_order(
    sequences: list[TokenSequence], limit: int | None
) -> None:
    one = build(sequences, limit=limit)
    larger = one.in_batches_of(6)
    assert larger.batch(0).tensors["input_ids"].shape == (6, 10)

    def labels(of: EvaluationSet) -> list[int]:
        batches = [of.batch(index) for index in range(of.num_batches)]
        found = [
            label
            for batch in batches
            for label in batch.tensors["labels"].flatten().tolist()
        ]
        return [label for label in found if label != IGNORE_INDEX]

    assert labels(larger) == labels(one)
    # Sums of other parts are other bits: results of the two are kept apart.
    assert larger.fingerprint != one.fingerprint


@pytest.mark.capability("O-15", "T-35", "T-49")
def test_a_limit_selects_the_same_samples_each_time_spread_over_all_sources(
    sequences: list[TokenSequence],
) -> None:
    one, again = build(sequences, limit=6), build(sequences, limit=6, batch=1)
    chosen = [
        sample for index in range(one.num_batches) for sample in one.batch(index).samples
    ]
    assert [(sample.source, sample.window) for sample in chosen] == [
        (0, 0),
        (0, 2),
        (0, 5),
        (0, 7),
        (1, 0),
        (1, 2),
    ]
    assert chosen == [
        sample
        for index in range(again.num_batches)
        for sample in again.batch(index).samples
    ]
    assert build(sequences, limit=99).num_samples == 15


def test_different_batches_have_different_hashes(sequences: list[TokenSequence]) -> None:
    one = build(sequences)
    assert len({one.batch(index).hash for index in range(4)}) == 4
    assert one.batch(2).hash == build(sequences).batch(2).hash


def test_a_batch_out_of_range_is_refused(sequences: list[TokenSequence]) -> None:
    one = build(sequences)
    for index in (-1, 4):
        with pytest.raises(IndexError, match="of 4 of heldOut"):
            one.batch(index)


def test_fingerprints_of_sets_are_equal_only_if_all_their_batches_are_equal(
    sequences: list[TokenSequence],
) -> None:
    one = build(sequences).fingerprint
    assert build(sequences, limit=1000).fingerprint == one, (
        "a limit beyond the set changes nothing"
    )
    others = [
        build(sequences, limit=6),
        build(sequences, batch=2),
        build(sequences, content="other"),
        build(sequences[:1]),
    ]
    assert len({one, *(other.fingerprint for other in others)}) == 5
