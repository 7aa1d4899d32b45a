"""A part of a tensor is updated to the bits that the whole tensor would get, for any split."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from evergrad_trainer.optim.parts import TensorPart, plan_lines, update_parts

HYPER = {"learning_rate": 1e-3, "betas": (0.9, 0.95), "epsilon": 1e-8, "weight_decay": 0.1}


def make(total: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Weights, gradient and moments. Magnitudes are spread, so that roundings differ as much as possible."""
    source = torch.Generator().manual_seed(seed)
    weights, gradient, average = (
        (
            torch.randn(total, generator=source) * torch.rand(total, generator=source).exp()
        ).to(dtype)
        for _ in range(3)
    )
    return [weights, gradient, average, average.float().square().to(dtype)]


def update(tensors: list[torch.Tensor], borders: list[int]) -> list[torch.Tensor]:
    """Copies of the tensors after two updates in parts between the borders."""
    state = [tensor.clone() for tensor in tensors]
    total = state[0].numel()
    parts = [
        TensorPart(*(tensor[begin:end] for tensor in state), begin=begin, total=total)
        for begin, end in itertools.pairwise(borders)
    ]
    for updates in (7, 8):
        update_parts(parts, updates=updates, **HYPER)  # type: ignore[arg-type]
    return state


def update_whole(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the result of torch's own optimizer for whole tensors after two updates."""
    weights = torch.nn.Parameter(tensors[0].clone())
    weights.grad = tensors[1].clone()
    optimizer = torch.optim.AdamW(
        [weights], lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True
    )
    optimizer.state[weights] = {
        "step": torch.tensor(7.0), "exp_avg": tensors[2].clone(), "exp_avg_sq": tensors[3].clone()
    }  # fmt: skip
    optimizer.step()
    optimizer.step()
    moments = optimizer.state[weights]
    return [weights.detach(), tensors[1], moments["exp_avg"], moments["exp_avg_sq"]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(st.data())
def test_any_split_is_bit_equal_to_the_whole(
    dtype: torch.dtype, data: st.DataObject
) -> None:
    total = data.draw(st.integers(1, 300))
    cuts = data.draw(st.lists(st.integers(0, total), max_size=4))
    tensors = make(total, dtype, data.draw(st.integers(0, 1000)))
    whole = update_whole(tensors)
    assert all(map(torch.equal, update(tensors, [0, *sorted(cuts), total]), whole))


def test_a_large_tensor_split_into_matrix_rows_is_bit_equal_to_the_whole() -> None:
    total = 777 * 130
    tensors = make(total, torch.float32, 0)
    whole = update_whole(tensors)
    assert all(map(torch.equal, update(tensors, list(range(0, total + 1, 777))), whole))


def test_only_lines_shared_with_other_ranks_are_copied() -> None:
    weights = torch.zeros(100)
    part = TensorPart(weights, weights, weights, weights, begin=10, total=1000)
    assert plan_lines(part) == [(0, 6, 0, 16), (6, 86, 16, 96), (86, 100, 96, 112)]
    aligned = TensorPart(weights[:96], weights, weights, weights, begin=16, total=1000)
    assert plan_lines(aligned) == [(0, 96, 16, 112)]


def test_an_empty_part_has_nothing_to_update() -> None:
    empty = torch.zeros(0)
    part = TensorPart(empty, empty, empty, empty, begin=5, total=5)
    assert plan_lines(part) == []
    update_parts([part], updates=0, **HYPER)  # type: ignore[arg-type]
