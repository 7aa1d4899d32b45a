"""A state's hash depends on each of its bits, and the majority of the ranks that held the state determines
which rank is wrong."""

import pytest
import torch

from evergrad_trainer.base.errors import DivergedError
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.replicas import (
    compare_states,
    compare_steps,
    compare_transferred,
    find_suspects,
    hash_state,
)
from evergrad_trainer.state.transfer import StateTransfer


def make_state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.even": torch.randn(4, 6, generator=generator),
        "model.odd": torch.randn(7, generator=generator),
        "model.half": torch.randn(11, generator=generator).to(torch.bfloat16),
        "model.mask": torch.tensor([True, False, True]),
        "optimizer.step": torch.tensor(3.0),
        "optimizer.count": torch.tensor([2**60, -1]),
        "optimizer.none": torch.zeros(0),
    }


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def test_equal_states_have_equal_hashes_in_any_order() -> None:
    state = make_state()
    assert hash_state(state) == hash_state(dict(reversed(make_state().items())))
    assert -(2**63) <= hash_state(state) < 2**63
    assert hash_state({}) == 0


@pytest.mark.parametrize(
    "name", [name for name, tensor in make_state().items() if tensor.numel()]
)
def test_every_single_bit_changes_the_hash(name: str) -> None:
    state = make_state()
    whole = hash_state(state)
    data = bytes_of(state[name])
    for index in range(data.numel()):
        for bit in range(8):
            if state[name].dtype == torch.bool and bit:
                continue
            data[index] ^= 1 << bit
            assert hash_state(state) != whole, (index, bit)
            data[index] ^= 1 << bit
    assert hash_state(state) == whole


def test_two_swapped_tensors_change_the_hash() -> None:
    one, other = torch.randn(8), torch.randn(8)
    assert hash_state({"a": one, "b": other}) != hash_state({"a": other, "b": one})


def test_an_unaligned_view_has_the_hash_of_its_values() -> None:
    base = torch.randn(9)
    assert hash_state({"a": base[1:]}) == hash_state({"a": base[1:].clone()})


@pytest.mark.parametrize(
    ("values", "holders", "suspects"),
    [
        ([5, 5, 5], (), ()),
        ([5, 5, 6], (), (2,)),
        ([6, 5, 5, 7], (), (0, 1, 2, 3)),
        ([6, 5, 5, 5, 7], (), (0, 4)),
        ([5, 6], (), (0, 1)),
        ([5, 6], (0,), (1,)),
        ([6, 5, 6, 6], (1,), (0, 2, 3)),
        ([5, 6, 5, 6, 6], (0, 1, 2), (1, 3, 4)),
    ],
    ids=[
        "all equal", "one of three", "half is no majority", "two of five", "two cannot tell", "the source is right",
        "the only holder outvotes those it fed", "a wrong holder and those it fed",
    ],
)  # fmt: skip
def test_the_majority_of_the_holders_of_the_state_is_right(
    values: list[int], holders: tuple[int, ...], suspects: tuple[int, ...]
) -> None:
    assert find_suspects(values, holders=holders) == suspects


@pytest.mark.parametrize(
    ("values", "suspects"),
    [
        ([5, 8, 5, 8], ()),
        ([5, 8, 5, 9], (1, 3)),
        ([5, 8, 5, 8, 6, 8], (4,)),
        ([5, 9, 5, 8, 6, 8], (1, 4)),
    ],
    ids=["parts differ", "two replicas cannot tell", "one of three", "one of each part"],
)
def test_a_rank_is_compared_with_ranks_that_hold_the_same_shard_of_other_replicas(
    values: list[int], suspects: tuple[int, ...]
) -> None:
    assert find_suspects(values, shards=2) == suspects


class Ranks:
    """A world whose other ranks' numbers are given."""

    def __init__(self, *others: int) -> None:
        self.size, self.rank = 1 + len(others), 0
        self._others = others

    def gather_integers(self, value: int) -> list[int]:
        return [value, *self._others]


def test_the_rank_whose_state_differs_is_named() -> None:
    state = make_state()
    own = hash_state(state)
    compare_states(state, Ranks(own, own), step=7)  # type: ignore[arg-type]
    with pytest.raises(
        DivergedError,
        match=r"the state after step 7 differs between ranks; by majority that of rank 1",
    ) as raised:
        compare_states(state, Ranks(own + 1, own), step=7)  # type: ignore[arg-type]
    assert raised.value.ranks == (1,)
    with pytest.raises(
        DivergedError, match="one of ranks 0 and 1 is wrong, and two cannot tell which"
    ):
        compare_states(state, Ranks(own + 1), step=7)  # type: ignore[arg-type]


def test_the_rank_whose_shard_of_a_replica_differs_is_named() -> None:
    state = make_state()
    own = hash_state(state)
    compare_states(state, Ranks(3, own, 3), step=7, shards=2)  # type: ignore[arg-type]
    compare_states(state, Ranks(3, 4, 5), step=7, shards=4)  # type: ignore[arg-type]
    with pytest.raises(
        DivergedError, match="by majority that of rank 3 is wrong"
    ) as raised:
        compare_states(state, Ranks(3, own, 4, own, 3), step=7, shards=2)  # type: ignore[arg-type]
    assert raised.value.ranks == (3,)
    with pytest.raises(
        DivergedError, match="one of ranks 1 and 3 is wrong, and two cannot tell which"
    ):
        compare_states(state, Ranks(3, own, 4), step=7, shards=2)  # type: ignore[arg-type]


def test_replicated_tensors_next_to_shards_are_compared_on_all_ranks() -> None:
    state = make_state()
    name = sorted(state)[0]
    own = hash_state({name: state[name]})
    compare_states(state, Ranks(own, own), step=7, shards=3, replicated=[name])  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match="by majority that of rank 1 is wrong"):
        compare_states(state, Ranks(own + 1, own), step=7, shards=3, replicated=[name])  # type: ignore[arg-type]


def test_a_rank_that_received_state_is_compared_only_with_its_source() -> None:
    """Where replicas are not compared, since hosts of different kinds may differ by rounding."""
    state = make_state()
    own = hash_state(state)
    compare_transferred(state, Ranks(own + 5, own), (StateTransfer(0, 2),))  # type: ignore[arg-type]
    with pytest.raises(DivergedError, match="rank 2") as raised:
        compare_transferred(state, Ranks(own, own + 1), (StateTransfer(0, 2),))  # type: ignore[arg-type]
    assert raised.value.ranks == (2,)


def test_ranks_at_different_steps_are_reported_with_their_steps() -> None:
    compare_steps([4, 4])
    with pytest.raises(
        DivergedError,
        match=r"rank 0: 31, rank 1: 1, rank 2: 31.*by majority that of rank 1",
    ):
        compare_steps([31, 1, 31])


def test_a_world_of_one_compares_nothing() -> None:
    compare_states({}, World(0, rank=0, size=1, device=torch.device("cpu")), step=1)
