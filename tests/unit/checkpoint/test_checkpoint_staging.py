"""The snapshot: by value, into reused memory, each replicated tensor by one rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad_trainer.checkpoint.staging import HostStager, assign_owners, require_tensors


def test_a_snapshot_keeps_its_values_if_the_source_changes() -> None:
    source = {"a": torch.ones(5, 3), "b": torch.tensor(2.0), "c": torch.arange(7)}
    snapshot = HostStager().stage(source, rank=0, world_size=1)
    for value in source.values():
        value.zero_()
    assert torch.equal(snapshot.tensors["a"].data, torch.ones(5, 3))
    assert snapshot.tensors["b"].data.item() == 2.0
    assert torch.equal(snapshot.tensors["c"].data, torch.arange(7))


def test_the_next_snapshot_reuses_the_memory() -> None:
    stager, source = HostStager(), {"a": torch.ones(1000)}
    first = stager.stage(source, rank=0, world_size=1).tensors["a"].data.data_ptr()
    assert stager.stage(source, rank=0, world_size=1).tensors["a"].data.data_ptr() == first


def test_staging_memory_grows_with_the_state_and_is_released_if_mostly_unused() -> None:
    stager = HostStager()
    for size in (10, 10_000, 9_000, 100):
        data = (
            stager.stage({"a": torch.full((size,), 3.0)}, rank=0, world_size=1)
            .tensors["a"]
            .data
        )
        assert data.untyped_storage().nbytes() < 2 * data.nbytes + 64
        assert torch.equal(data, torch.full((size,), 3.0))


def test_strided_tensors_and_tensors_with_gradients_are_copied_dense() -> None:
    source = torch.nn.Parameter(torch.arange(12.0).reshape(3, 4)).t()
    data = HostStager().stage({"a": source}, rank=0, world_size=1).tensors["a"].data
    assert data.is_contiguous() and not data.requires_grad
    assert torch.equal(data, source.detach())


def test_the_snapshots_of_all_ranks_together_contain_every_tensor_once() -> None:
    source = {f"t{index}": torch.full((index + 1,), float(index)) for index in range(20)}
    snapshots = [HostStager().stage(source, rank=rank, world_size=3) for rank in range(3)]
    keys = [key for snapshot in snapshots for key in snapshot.tensors]
    assert sorted(keys) == sorted(source)
    assert len({snapshot.signature for snapshot in snapshots}) == 1


def test_the_signature_differs_for_other_keys_shapes_and_dtypes() -> None:
    states = [
        {"a": torch.ones(2)},
        {"b": torch.ones(2)},
        {"a": torch.ones(3)},
        {"a": torch.ones(2).half()},
    ]
    assert (
        len({HostStager().stage(state, rank=0, world_size=1).signature for state in states})
        == 4
    )


@given(
    st.dictionaries(st.text(min_size=1), st.integers(0, 1000), max_size=40),
    st.integers(1, 9),
)
def test_owners_are_balanced_up_to_the_largest_tensor_and_independent_of_order(
    sizes: dict[str, int], world_size: int
) -> None:
    owners = assign_owners(sizes, world_size)
    assert owners == assign_owners(dict(reversed(sizes.items())), world_size)
    loads = [
        sum(size for key, size in sizes.items() if owners[key] == rank)
        for rank in range(world_size)
    ]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@pytest.mark.parametrize(
    "value",
    [
        3,
        "text",
        None,
        {"nested": 1},
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, device="meta"),
    ],
)
def test_a_value_that_is_not_a_dense_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match=r"dense tensors only, not optimizer\.odd"):
        require_tensors({"model.fine": torch.ones(1), "optimizer.odd": value})
