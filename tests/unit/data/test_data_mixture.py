"""The mixture: shares, counts in closed form, epochs, golden values."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evergrad_manifest.errors import ConfigurationError
from evergrad_trainer.data.mixture import PERIOD, Mixture, quantise_weights
from evergrad_trainer.data.order import Permutation, SampleId

weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=12)


def locate_first(mixture: Mixture, count: int) -> list[SampleId]:
    """The samples at the first positions of a mixture."""
    return [mixture.locate(position) for position in range(count)]


def test_the_values_of_the_mixture_never_change() -> None:
    mixture = Mixture([1000, 77, 5], weights=[0.7, 0.2, 0.1], seed=11)
    assert mixture.shares == (45875, 13107, 6554)
    golden = {
        0: (SampleId(0, 0, 787), [0, 0, 0]),
        1: (SampleId(0, 0, 96), [1, 0, 0]),
        2: (SampleId(1, 0, 40), [2, 0, 0]),
        3: (SampleId(0, 0, 310), [2, 1, 0]),
        65535: (SampleId(0, 45, 269), [45874, 13107, 6554]),
        65536: (SampleId(0, 45, 943), [45875, 13107, 6554]),
        10**9: (SampleId(0, 699996, 466), [699996948, 199996948, 100006104]),
    }
    assert {
        position: (mixture.locate(position), mixture.cursor(position))
        for position in golden
    } == golden


@pytest.mark.acceptance("number-C-32")
def test_two_sources_of_equal_weight_alternate() -> None:
    located = locate_first(Mixture([10, 10], weights=[1, 1], seed=0), 8)
    sources = [sample.source for sample in located]
    assert sorted(sources[:2]) == [0, 1]
    assert sources == sources[:2] * 4


@pytest.mark.acceptance("number-T-51")
@pytest.mark.capability("T-51")
@settings(max_examples=15, deadline=None)
@given(weights)
def test_every_prefix_is_within_one_sample_of_the_requested_shares(
    values: list[float],
) -> None:
    mixture = Mixture([10**9] * len(values), weights=values, seed=0)
    sources = mixture._source_at
    counted = np.arange(1, PERIOD + 1)
    for source, share in enumerate(mixture.shares):
        deviation = np.abs(np.cumsum(sources == source) - counted * share / PERIOD)
        assert deviation.max() < 1


@pytest.mark.acceptance("8d-8g", "number-T-29")
@settings(max_examples=50, deadline=None)
@given(weights)
def test_shares_sum_to_the_total_and_are_within_one_of_the_exact_shares(
    values: list[float],
) -> None:
    shares = quantise_weights(values)
    assert sum(shares) == PERIOD
    assert all(
        abs(share - value * PERIOD / sum(values)) < 1.001
        for share, value in zip(shares, values, strict=True)
    )


@pytest.mark.capability("G-66")
@settings(max_examples=20, deadline=None)
@given(values=weights, position=st.integers(0, 3 * PERIOD))
def test_closed_form_counts_equal_counting(values: list[float], position: int) -> None:
    mixture = Mixture([10**6] * len(values), weights=values, seed=3)
    sources = np.resize(mixture._source_at, position).astype(int)
    assert mixture.cursor(position) == np.bincount(sources, minlength=len(values)).tolist()


def test_one_source_gives_its_permutations_epoch_after_epoch() -> None:
    mixture = Mixture([10], weights=[0.3], seed=9)
    for position in range(35):
        epoch, index = divmod(position, 10)
        window = Permutation(seed=9, source=0, epoch=epoch, size=10)(index)
        assert mixture.locate(position) == SampleId(0, epoch, window)
    assert mixture.cursor(35) == [35]


def test_each_window_appears_exactly_once_per_epoch_of_its_source() -> None:
    sizes = [100, 33, 1]
    mixture = Mixture(sizes, weights=[5, 2, 0.1], seed=1)
    located = locate_first(mixture, PERIOD)
    cursors = mixture.cursor(PERIOD)
    for source, size in enumerate(sizes):
        ids = [(one.epoch, one.window) for one in located if one.source == source]
        whole_epochs = cursors[source] // size
        assert len(set(ids)) == len(ids)
        assert sorted(ids[: whole_epochs * size]) == [
            (epoch, window) for epoch in range(whole_epochs) for window in range(size)
        ]


@pytest.mark.acceptance("8d-8g")
def test_a_weight_that_is_too_small_is_refused_with_the_smallest_sufficient_weight() -> (
    None
):
    with pytest.raises(ConfigurationError) as caught:
        quantise_weights([1.0, 1e-7])
    message = str(caught.value)
    assert message.startswith(
        "spec.training.data.sources[1].weight: 1e-07 is too small a share of all weights"
    )
    assert "at least 1.6e-05" in message
    assert min(quantise_weights([1.0, 1.6e-5])) == 1


def test_a_source_without_windows_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one window"):
        Mixture([3, 0], weights=[1, 1], seed=0)


def test_a_position_after_a_billion_samples_can_be_located() -> None:
    mixture = Mixture([10**9, 10**8, 10**7], weights=[0.7, 0.2, 0.1], seed=0)
    assert sum(mixture.cursor(10**9)) == 10**9
    assert mixture.locate(10**9).epoch in (0, 1, 9, 10)
