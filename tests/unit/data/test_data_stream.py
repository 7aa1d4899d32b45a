"""The training stream: batches as a pure function of step and slot, elastic plans, fingerprint, messages."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.batch import Batch
from evergrad_trainer.data.build import DataStreams
from evergrad_trainer.data.order import SampleId, sample_hash
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.data.token_source import IGNORE_INDEX
from evergrad_trainer.recipes.setup import open_recipe

Recipe = Callable[..., Training]
Write = Callable[[Path, Sequence[str]], Path]

SOURCES = [
    {"name": "docs", "path": "docs.jsonl", "weight": 3},
    {"name": "flat", "type": "tokens", "path": "ids.bin", "weight": 1},
]


@pytest.fixture
def build(
    tmp_path: Path,
    training: Recipe,
    documents: Write,
    topics: list[str],
    prepared_in: Callable[..., Prepared],
) -> Callable[..., DataStreams]:
    """Data of two sources, ``docs`` and ``flat``."""
    documents(tmp_path / "docs.jsonl", topics)
    (np.arange(401) % 257).astype("<u2").tofile(tmp_path / "ids.bin")

    def run(**sections: Any) -> DataStreams:
        recipe = training(
            **{**sections, "data": {"sources": SOURCES, **sections.get("data", {})}}
        )
        return open_recipe(recipe, prepared_in(recipe), tmp_path).data

    return run


def equal(first: Batch, second: Batch) -> bool:
    same_tensors = all(
        torch.equal(tensor, second.tensors[name]) for name, tensor in first.tensors.items()
    )
    facts = [
        (batch.samples, batch.hash, batch.weight, set(batch.tensors))
        for batch in (first, second)
    ]
    return same_tensors and facts[0] == facts[1]


@pytest.mark.capability("T-9")
def test_a_slot_has_inputs_shifted_labels_and_a_hash(
    build: Callable[..., DataStreams],
) -> None:
    stream = build().train
    assert (stream.slots_per_step, list(stream.cursor(0))) == (4, ["docs", "flat"])
    for step, slot in ((1, 0), (1, 3), (7, 2), (10**7, 1)):
        batch = stream.slot(step, slot)
        inputs, labels = batch.tensors["input_ids"], batch.tensors["labels"]
        assert inputs.shape == labels.shape == (2, 16)
        assert inputs.dtype == labels.dtype == torch.int64
        first = (step - 1) * 8 + slot * 2
        assert (
            batch.hash
            == sum(
                sample_hash(first + at, sample) for at, sample in enumerate(batch.samples)
            )
            % 2**64
        )
        learned = labels != IGNORE_INDEX
        assert batch.weight == int(learned.sum())
        shifted = learned[:, :-1]
        assert torch.equal(labels[:, :-1][shifted], inputs[:, 1:][shifted])


@pytest.mark.acceptance("8d-12a")
def test_a_slot_is_equal_in_any_order_of_reads(
    build: Callable[..., DataStreams],
) -> None:
    first, second = build().train, build().train
    keys = [(step, slot) for step in range(1, 30) for slot in range(4)]
    batches = {key: first.slot(*key) for key in keys}
    random.Random(0).shuffle(keys)
    assert all(equal(batches[key], second.slot(*key)) for key in keys)


def test_batches_do_not_share_memory(build: Callable[..., DataStreams]) -> None:
    stream = build().train
    batch = stream.slot(1, 0)
    batch.tensors["input_ids"].fill_(7)
    batch.tensors["labels"].fill_(7)
    assert not torch.equal(
        stream.slot(1, 0).tensors["input_ids"], batch.tensors["input_ids"]
    )


@pytest.mark.acceptance("8d-12b")
def test_every_token_of_a_source_is_a_label_once_per_epoch(
    build: Callable[..., DataStreams],
) -> None:
    stream = build(data={"sources": SOURCES[1:]}).train
    steps = -(-stream.num_samples // 8)
    labels: list[int] = []
    for step in range(1, steps + 1):
        for slot in range(4):
            batch = stream.slot(step, slot)
            for row, sample in enumerate(batch.samples):
                row_labels = batch.tensors["labels"][row]
                if sample.epoch == 0:
                    labels += row_labels[row_labels != IGNORE_INDEX].tolist()
    assert sorted(labels) == sorted((np.arange(1, 401) % 257).tolist())


@pytest.mark.capability("C-57", "A-32")
def test_the_last_step_of_an_epoch_is_filled_with_samples_of_the_next(
    build: Callable[..., DataStreams],
) -> None:
    stream = build(data={"sources": SOURCES[1:]}).train
    assert stream.num_samples == 25
    samples = [sample for slot in range(4) for sample in stream.slot(4, slot).samples]
    assert [sample.epoch for sample in samples] == [0, 1, 1, 1, 1, 1, 1, 1]


class ElasticRun:
    """A run whose world changes, is killed and rolls back, as the loop would drive the stream.

    The last row of a step counts.
    """

    def __init__(self, stream: TrainingStream, rng: random.Random) -> None:
        self.stream = stream
        self.rng = rng
        self.rows: dict[int, tuple[list[SampleId], int]] = {}

    def train(self, total: int) -> None:
        step, saved = 1, 0
        while step <= total:
            world = self.rng.randint(1, 12)
            for _ in range(self.rng.randint(1, 4)):
                if step > total:
                    return
                self.rows[step] = self.run_step(step, world)
                saved = step if self.rng.random() < 0.3 else saved
                step += 1
            if self.rng.random() < 0.4:
                step = saved + 1  # killed: back to the last checkpoint

    def run_step(self, step: int, world: int) -> tuple[list[SampleId], int]:
        by_slot: dict[int, Batch] = {}
        for rank in self.rng.sample(range(world), world):
            for slot in range(rank, self.stream.slots_per_step, world):
                by_slot[slot] = self.stream.slot(step, slot)
        samples = [sample for slot in sorted(by_slot) for sample in by_slot[slot].samples]
        return samples, sum(batch.hash for batch in by_slot.values()) % 2**64


@pytest.mark.acceptance("8d-12c")
@pytest.mark.capability("G-51")
def test_three_hundred_elastic_plans_train_the_same_samples_in_the_same_steps(
    build: Callable[..., DataStreams],
) -> None:
    stream = build(batching={"globalBatchSize": 12, "microBatchSize": 1}).train
    total = 8
    expected = [
        sample
        for step in range(1, total + 1)
        for slot in range(12)
        for sample in stream.slot(step, slot).samples
    ]
    hashes = set()
    for seed in range(300):
        run = ElasticRun(stream, random.Random(seed))
        run.train(total)
        assert [
            sample for step in range(1, total + 1) for sample in run.rows[step][0]
        ] == expected
        hashes.add(tuple(run.rows[step][1] for step in range(1, total + 1)))
    assert len(hashes) == 1
    assert max(Counter(expected).values()) == 1


@pytest.mark.acceptance("8d-12c", "8d-17b")
def test_each_sample_appears_once_per_epoch_under_every_plan(
    build: Callable[..., DataStreams],
) -> None:
    stream = build(
        data={"sources": SOURCES[:1]}, batching={"globalBatchSize": 12, "microBatchSize": 1}
    ).train
    total = 2 * -(-stream.num_samples // 12)
    for seed in range(5):
        run = ElasticRun(stream, random.Random(seed))
        run.train(total)
        seen = Counter(
            (sample.epoch, sample.window)
            for step in range(1, total + 1)
            for sample in run.rows[step][0]
        )
        assert max(seen.values()) == 1
        assert all(
            (epoch, window) in seen
            for epoch in (0, 1)
            for window in range(stream.num_samples)
        )


@pytest.mark.acceptance("8d-12a")
@pytest.mark.capability("G-26", "O-35")
def test_the_cursor_is_the_next_index_of_each_source_after_a_finished_step(
    build: Callable[..., DataStreams],
) -> None:
    stream = build().train
    assert stream.cursor(0) == {"docs": 0, "flat": 0}
    for step in (1, 5, 40):
        counted = Counter(
            sample.source
            for one in range(1, step + 1)
            for slot in range(4)
            for sample in stream.slot(one, slot).samples
        )
        assert stream.cursor(step) == {"docs": counted[0], "flat": counted[1]}


def test_the_fingerprint_depends_on_everything_that_changes_a_step(
    build: Callable[..., DataStreams],
) -> None:
    base = build().fingerprint
    assert build().fingerprint == base
    renamed = [{**SOURCES[0], "weight": 6, "name": "renamed"}, {**SOURCES[1], "weight": 2}]
    assert build(data={"sources": renamed}, horizon={"steps": 99}).fingerprint == base
    others = [
        build(data={"sequenceLength": 32}),
        build(batching={"globalBatchSize": 16, "microBatchSize": 2}),
        build(batching={"globalBatchSize": 8, "microBatchSize": 4}),
        build(reproducibility={"seed": 1}),
        build(data={"sources": SOURCES[::-1]}),
        build(data={"sources": [{**SOURCES[0], "weight": 4}, SOURCES[1]]}),
        build(data={"heldOut": {"fraction": 0.1}}),
    ]
    assert len({base, *(other.fingerprint for other in others)}) == len(others) + 1


def test_a_sample_is_described_by_its_position_in_the_source_file(
    build: Callable[..., DataStreams], topics: list[str]
) -> None:
    stream = build().train
    starts = np.cumsum([0, *(len(topic.encode()) + 1 for topic in topics)])
    for window in (0, 3, 40):
        first, last = (
            int(np.searchsorted(starts, token, side="right"))
            for token in (window * 16, window * 16 + 16)
        )
        lines = f"line {first}" if first == last else f"lines {first} to {last}"
        assert (
            stream.describe(SampleId(0, 2, window))
            == f"docs/epoch 2/window {window} (docs.jsonl, {lines})"
        )
    assert (
        stream.describe(SampleId(1, 0, 2))
        == "flat/epoch 0/window 2 (ids.bin, tokens 32 to 48)"
    )


def test_positions_before_the_first_and_slots_after_the_last_are_refused(
    build: Callable[..., DataStreams],
) -> None:
    stream = build().train
    for step, slot in ((0, 0), (1, 4), (1, -1)):
        with pytest.raises(IndexError, match="steps count from 1, slots from 0 to 3"):
            stream.slot(step, slot)


@pytest.mark.capability("O-66", "T-26", "C-8")
def test_held_out_documents_and_evaluation_sources_become_sets(
    tmp_path: Path, build: Callable[..., DataStreams], documents: Write
) -> None:
    documents(tmp_path / "eval.jsonl", ["x" * 100])
    evaluation = {"sources": [{"name": "other", "path": "eval.jsonl"}]}
    data = build(data={"heldOut": {"fraction": 0.2}}, evaluation=evaluation)
    assert [one.name for one in data.evaluation] == ["heldOut", "other"]
    held_out = data.evaluation[0]
    assert {
        sample.source
        for index in range(held_out.num_batches)
        for sample in held_out.batch(index).samples
    } == {0, 1}
    assert [one.name for one in build().evaluation] == []


def test_data_of_another_tokenizer_is_refused(
    tmp_path: Path, training: Recipe, documents: Write, prepared_in: Callable[..., Prepared]
) -> None:
    documents(tmp_path / "docs.jsonl", ["a"])
    prepared = replace(prepared_in(training()), tokenizer_identity="other")
    with pytest.raises(
        DataError, match="was prepared with the tokenizer other; this one is byte-1"
    ):
        open_recipe(training(), prepared, tmp_path)


def test_a_weight_that_would_never_be_drawn_is_refused(
    build: Callable[..., DataStreams],
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"spec\.training\.data\.sources\[1\]\.weight"
    ):
        build(data={"sources": [SOURCES[0], {**SOURCES[1], "weight": 1e-6}]})
