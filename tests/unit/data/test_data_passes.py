"""Counts and passes of sources, parts of them, the ends of mixtures, and the first batch alone."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad_manifest.derive import derive_steps
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.training import Training
from evergrad_trainer.data.build import DataStreams, build_data
from evergrad_trainer.data.epochs import PassMixture, count_passes, exhausted_after
from evergrad_trainer.data.mixture import Mixture
from evergrad_trainer.data.order import Permutation, SampleId
from evergrad_trainer.data.prepared import Prepared
from evergrad_trainer.recipes.setup import open_recipe

Recipe = Callable[..., Training]
Open = Callable[..., DataStreams]
Write = Callable[[Path, Sequence[str]], Path]

# 401 and 161 tokens are 25 and 10 samples of 16.
SOURCES: list[dict[str, Any]] = [
    {"name": "large", "type": "tokens", "path": "large.bin"},
    {"name": "small", "type": "tokens", "path": "small.bin"},
]


@pytest.fixture
def opened(
    tmp_path: Path, training: Recipe, prepared_in: Callable[..., Prepared]
) -> Callable[..., tuple[Training, DataStreams]]:
    """A recipe over a source of 25 samples and one of 10, and its data."""
    for name, tokens in (("large", 401), ("small", 161)):
        (np.arange(tokens) % 257).astype("<u2").tofile(tmp_path / f"{name}.bin")

    def run(**sections: Any) -> tuple[Training, DataStreams]:
        recipe = training(
            **{**sections, "data": {"sources": SOURCES, **sections.get("data", {})}}
        )
        return recipe, open_recipe(recipe, prepared_in(recipe), tmp_path).data

    return run


def sources_of(mixture: PassMixture, positions: range) -> list[int]:
    return [mixture.locate(position).source for position in positions]


def test_an_epoch_of_counts_is_spread_as_computed_by_hand() -> None:
    # The first source has (2q + 3) div 6 of the first q places: 0 0 1 1 1 2 2.
    assert sources_of(PassMixture([2, 4], counts=[2, 4], seed=0), range(6)) == [
        1,
        0,
        1,
        1,
        0,
        1,
    ]
    # The first source has (q + 2) div 4 of four places; the second has (p + 1) div 3 of the other three.
    assert sources_of(PassMixture([9, 9, 9], counts=[1, 1, 2], seed=0), range(4)) == [
        2,
        0,
        1,
        2,
    ]


def test_the_values_of_the_pass_order_never_change() -> None:
    mixture = PassMixture([1000, 77, 5], counts=[1000, 154, 3], seed=11)
    golden = {
        position: (mixture.locate(position), mixture.cursor(position))
        for position in (0, 1, 1156, 1157, 10**12)
    }
    assert golden == GOLDEN


GOLDEN: dict[int, Any] = {
    0: (SampleId(0, 0, 787), [0, 0, 0]),
    1: (SampleId(0, 0, 96), [1, 0, 0]),
    1156: (SampleId(0, 0, 465), [999, 154, 3]),
    1157: (SampleId(0, 1, 862), [1000, 154, 3]),
    10**12: (SampleId(0, 864304235, 125), [864304235091, 133102852204, 2592912705]),
}


SETTINGS_OF_ORDER = pytest.mark.parametrize(
    "data",
    [
        {"mixing": "passes"},
        {"mixing": "passes", "sources": [{**SOURCES[0], "samples": 7}, SOURCES[1]]},
        {"overfitFirstBatch": True},
    ],
    ids=["passes", "passes over a part", "first batch"],
)


@SETTINGS_OF_ORDER
def test_a_step_has_the_same_samples_for_any_reader_of_its_slots_and_any_start_step(
    opened: Callable[..., tuple[Training, DataStreams]], data: dict[str, Any]
) -> None:
    batching = {"globalBatchSize": 12, "microBatchSize": 1}
    _, whole = opened(data=data, batching=batching)
    steps = range(1, 9)
    samples = {
        step: [whole.train.slot(step, slot).samples for slot in range(12)] for step in steps
    }
    # Restart at each step, as after a kill, with another number of processes in another order.
    for step in reversed(steps):
        _, begun = opened(data=data, batching=batching)
        world = 1 + step % 5
        found = {
            slot: begun.train.slot(step, slot).samples
            for rank in reversed(range(world))
            for slot in range(rank, 12, world)
        }
        assert [found[slot] for slot in range(12)] == samples[step]


@SETTINGS_OF_ORDER
def test_the_cursor_of_each_step_counts_the_samples_that_its_steps_have_read(
    opened: Callable[..., tuple[Training, DataStreams]], data: dict[str, Any]
) -> None:
    _, found = opened(data=data)
    counted = Counter(dict.fromkeys((0, 1), 0))
    for step in range(1, 20):
        if step == 1 or "overfitFirstBatch" not in data:
            for slot in range(4):
                counted.update(one.source for one in found.train.slot(step, slot).samples)
        assert found.train.cursor(step) == {"large": counted[0], "small": counted[1]}


def test_existing_runs_keep_their_fingerprint_and_their_order(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    _, data = opened()
    stream = data.train
    # Written out, because the content of a run's checkpoints must never need another field.
    facts = {
        **stream.stages[0].facts,
        "order": 1,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "seed": 0,
        "shares": [32768, 32768],
        "sources": [source.fingerprint for source, _ in stream.stages[0].sources.values()],
    }
    text = json.dumps(facts, sort_keys=True)
    assert stream.fingerprint == xxhash.xxh3_128_hexdigest(text.encode())
    mixture = Mixture([25, 10], weights=[1, 1], seed=0)
    for step, slot in ((1, 0), (3, 2), (1000, 3)):
        first = (step - 1) * 8 + slot * 2
        assert stream.slot(step, slot).samples == (
            mixture.locate(first),
            mixture.locate(first + 1),
        )


def test_the_end_of_a_source_is_found_at_any_distance() -> None:
    rare = Mixture([10**12, 10**12], weights=[65535, 1], seed=0)
    end = exhausted_after(rare, Fraction(10**6), "all")
    assert end > 2**64
    assert rare.cursor(end)[1] == 10**18 and rare.cursor(end - 1)[1] == 10**18 - 1


@pytest.mark.acceptance("number-A-43")
@pytest.mark.capability("A-43")
@settings(max_examples=30, deadline=None)
@given(
    counts=st.lists(st.integers(1, 40), min_size=1, max_size=9),
    position=st.integers(0, 500),
)
def test_counts_are_exact_in_each_epoch_and_the_cursor_equals_counting(
    counts: list[int], position: int
) -> None:
    mixture = PassMixture([7] * len(counts), counts=counts, seed=3)
    for epoch in (0, 2):
        places = range(epoch * mixture.epoch, (epoch + 1) * mixture.epoch)
        assert Counter(sources_of(mixture, places)) == Counter(dict(enumerate(counts)))
    counted = Counter(sources_of(mixture, range(position)))
    assert mixture.cursor(position) == [counted[source] for source in range(len(counts))]


def test_each_source_runs_through_whole_permutations_across_epoch_boundaries() -> None:
    mixture = PassMixture([4, 3], counts=[2, 6], seed=5)
    located = [mixture.locate(position) for position in range(4 * mixture.epoch)]
    for source, size in ((0, 4), (1, 3)):
        own = [one for one in located if one.source == source]
        for running, sample in enumerate(own):
            epoch, index = divmod(running, size)
            window = Permutation(seed=5, source=source, epoch=epoch, size=size)(index)
            assert sample == SampleId(source, epoch, window)


@pytest.mark.acceptance("number-C-32")
@pytest.mark.capability("C-32", "O-78")
def test_a_mixture_ends_when_its_first_or_its_last_source_is_exhausted() -> None:
    # The sources alternate: the third item of one is at position 4, the tenth of the other at position 19.
    turns = Mixture([3, 10], weights=[1, 1], seed=0)
    assert exhausted_after(turns, Fraction(1), "first") == 5
    assert exhausted_after(turns, Fraction(1), "all") == 20
    assert exhausted_after(turns, Fraction(3, 2), "first") == 9
    # By hand above: 1 0 1 1 0 1.
    passes = PassMixture([2, 4], counts=[2, 4], seed=0)
    assert exhausted_after(passes, Fraction(1), "first") == 5
    assert exhausted_after(passes, Fraction(1), "all") == 6
    assert exhausted_after(passes, Fraction(2), "all") == 12


@pytest.mark.capability("C-32", "O-78")
def test_a_horizon_ends_before_a_sample_repeats_or_after_all_samples(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    lengths = {}
    for which in ("first", "all"):
        recipe, data = opened(horizon={"epochs": 1, "exhausted": which})
        numbers = data.derive_steps(recipe)
        lengths[which] = numbers.total_steps
        seen = Counter(
            (sample.source, sample.window)
            for step in range(1, numbers.total_steps + 1)
            for slot in range(4)
            for sample in data.train.slot(step, slot).samples
        )
        if which == "first":
            assert max(seen.values()) == 1
        else:
            assert len(seen) == 35
    # In turns, eight a step: the tenth of the small source is sample 20, the 25th of the large one 49.
    assert lengths == {"first": 2, "all": 7}


def test_a_source_that_ends_within_the_first_step_is_refused(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    recipe, data = opened(
        horizon={"epochs": 1, "exhausted": "first"},
        batching={"globalBatchSize": 64, "microBatchSize": 2},
    )
    with pytest.raises(
        ConfigurationError, match="exhausted: a source is exhausted after 20"
    ):
        derive_steps(recipe, num_samples=35, exhausted_after=data.exhausted_after)


@pytest.mark.capability("A-43")
def test_passes_give_each_source_exactly_as_many_times_as_its_weight(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    sources = [{**SOURCES[0], "weight": 1}, {**SOURCES[1], "weight": 3}]
    recipe, data = opened(
        data={"sources": sources, "mixing": "passes"},
        batching={"globalBatchSize": 5, "microBatchSize": 1},
        horizon={"epochs": 1},
    )
    assert data.train.num_samples == 25 + 3 * 10
    steps = derive_steps(recipe, num_samples=data.train.num_samples).total_steps
    seen = Counter(
        (sample.source, sample.window)
        for step in range(1, steps + 1)
        for slot in range(5)
        for sample in data.train.slot(step, slot).samples
    )
    wanted = {(0, window): 1 for window in range(25)} | {
        (1, window): 3 for window in range(10)
    }
    assert seen == wanted and data.train.cursor(steps) == {"large": 25, "small": 30}


def test_passes_are_rounded_to_whole_samples_and_at_least_one() -> None:
    # 0.1 · 30 is 3.0000000000000004 in floats; a half rounds up.
    assert count_passes([30, 5, 7], [0.1, 0.5, 2]) == [3, 3, 14]
    with pytest.raises(
        ConfigurationError, match=r"sources\[1\]\.weight: 0.04 passes over 10"
    ):
        count_passes([10, 10], [1, 0.04])


@pytest.mark.acceptance("number-A-43")
@pytest.mark.capability("A-43")
def test_a_fraction_of_a_source_is_the_same_in_each_epoch_and_depends_on_the_seed(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    def windows(samples: Any, **settings: Any) -> set[int]:
        sources = [{**SOURCES[0], "samples": samples}]
        _, data = opened(data={"sources": sources}, reproducibility=settings)
        rows = {}
        for step in range(1, 5):
            for slot in range(4):
                batch = data.train.slot(step, slot)
                for row, sample in enumerate(batch.samples):
                    first = tuple(batch.tensors["input_ids"][row].tolist())
                    assert rows.setdefault(sample.window, first) == first
        assert len(rows) == data.train.num_samples
        # The first token of a window names it: 16 tokens each, of 0, 1, 2, ….
        return {row[0] for row in rows.values()}

    chosen = windows(8)
    assert len(chosen) == 8 and windows("32%") == chosen == windows(8, seed=0)
    assert windows(8, dataSeed=1) != chosen and windows(8, seed=7, dataSeed=0) == chosen
    assert len(windows("100%")) == 25
    with pytest.raises(
        ConfigurationError, match=r"\[0\]\.samples: 26 are wanted and the source"
    ):
        windows(26)


@pytest.mark.capability("A-33")
def test_overfit_first_batch_trains_on_that_batch_only_and_changes_its_hash(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    _, plain = opened()
    _, data = opened(data={"overfitFirstBatch": True})
    for slot in range(4):
        wanted = plain.train.slot(1, slot)
        for step in (1, 2, 10**6):
            batch = data.train.slot(step, slot)
            assert (batch.samples, batch.hash) == (wanted.samples, wanted.hash)
            assert torch.equal(batch.tensors["input_ids"], wanted.tensors["input_ids"])
    assert data.train.cursor(0) == {"large": 0, "small": 0}
    assert data.train.cursor(1) == plain.train.cursor(1) == data.train.cursor(99)
    assert data.fingerprint != plain.fingerprint


def test_the_fingerprint_depends_on_each_of_these_settings_and_is_unchanged_without_them(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    _, base = opened()
    same = [
        {"data": {"mixing": "shares", "overfitFirstBatch": False}},
        {"reproducibility": {"seed": 3, "dataSeed": 0}},
        {"horizon": {"epochs": 1, "exhausted": "all"}},
    ]
    assert [opened(**one)[1].fingerprint for one in same] == [base.fingerprint] * 3
    others = [
        {"data": {"mixing": "passes"}},
        {"data": {"overfitFirstBatch": True}},
        {"data": {"sources": [{**SOURCES[0], "samples": 8}, SOURCES[1]]}},
        {"reproducibility": {"dataSeed": 1}},
    ]
    found = {opened(**one)[1].fingerprint for one in others}
    assert len({base.fingerprint, *found}) == 5


def test_exhaustion_of_sources_with_several_stages_has_no_common_count(
    opened: Callable[..., tuple[Training, DataStreams]],
) -> None:
    recipe, data = opened(horizon={"epochs": 1, "exhausted": "all"})
    (stage,) = data.train.stages
    with pytest.raises(ValueError, match="needs a single stage"):
        build_data(recipe, [replace(stage, until=2), stage], {})
