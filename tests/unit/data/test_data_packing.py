"""Which rows share a sample."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from evergrad_trainer.data.packing import Bins, one_each, pack


def members(bins: Bins) -> list[list[int]]:
    return [bins.of(number) for number in range(len(bins))]


def test_each_row_is_packed_where_it_leaves_the_least_space() -> None:
    # 5, 4, 3, 3, 2: 5 and 4 begin samples; 3 fills the second; the other 3 begins one; 2 fills the first.
    assert members(pack(np.array([3, 5, 2, 4, 3]), capacity=7)) == [[1, 2], [3, 0], [4]]


def test_rows_of_one_size_keep_their_order() -> None:
    assert members(pack(np.array([2, 2, 2, 2, 2]), capacity=4)) == [[0, 1], [2, 3], [4]]


@given(some.lists(some.integers(1, 40), max_size=200))
def test_each_row_is_in_one_sample_and_samples_are_mostly_full(
    sizes: list[int],
) -> None:
    found = members(pack(np.array(sizes, dtype=np.int64), capacity=40))
    assert sorted(row for rows in found for row in rows) == list(range(len(sizes)))
    fills = [sum(sizes[row] for row in rows) for rows in found]
    assert all(fill <= 40 for fill in fills)
    # Two samples that fit together would have been one.
    assert sum(fill <= 20 for fill in fills) <= 1


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="a row of 9 does not fit into 8"):
        pack(np.array([1, 9]), capacity=8)


def test_without_packing_each_row_is_one_sample() -> None:
    assert members(one_each(3)) == [[0], [1], [2]]
    with pytest.raises(IndexError, match="sample 3 of 3"):
        one_each(3).of(3)
