"""Random numbers depend on their purpose, never on the process that draws them."""

import itertools

import pytest
import torch

from evergrad_trainer.models.randomness import Purpose, keyed_seed, seed_generators


@pytest.mark.acceptance("number-G-60")
@pytest.mark.capability("G-22", "G-60")
def test_every_key_has_its_own_seed() -> None:
    keys = itertools.product((0, 1, 2**63 - 1), range(20), range(20), Purpose)
    seeds = [keyed_seed(*key) for key in keys]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.acceptance("number-G-60")
def test_seeds_match_the_published_values() -> None:
    """Another value here would give a resumed run other dropout masks than it began with."""
    assert keyed_seed(0, 0, 0, Purpose.INITIAL_WEIGHTS) == 3803006026513255849
    assert keyed_seed(7, 1200, 3, Purpose.FORWARD) == 7283817026138052114


def test_parts_of_a_key_are_not_interchangeable() -> None:
    assert keyed_seed(0, 1, 2, Purpose.FORWARD) != keyed_seed(0, 2, 1, Purpose.FORWARD)
    assert keyed_seed(1, 0, 2, Purpose.FORWARD) != keyed_seed(0, 1, 2, Purpose.FORWARD)


@pytest.mark.acceptance("number-G-60")
@pytest.mark.parametrize("purpose", Purpose)
def test_neighbouring_seeds_and_steps_are_uncorrelated(purpose: Purpose) -> None:
    seeds = [keyed_seed(seed, 0, 0, purpose) for seed in range(501)]
    steps = [keyed_seed(0, step, 0, purpose) for step in range(501)]
    for numbers in (seeds, steps):
        different = [
            (one ^ other).bit_count() for one, other in itertools.pairwise(numbers)
        ]
        assert 29 < sum(different) / len(different) < 34


def test_a_slot_draws_the_same_numbers_independently_of_earlier_draws() -> None:
    seed_generators(3, 5, 1, Purpose.FORWARD)
    first = torch.rand(4)
    torch.rand(1000)
    seed_generators(3, 5, 1, Purpose.FORWARD)
    assert torch.equal(torch.rand(4), first)
