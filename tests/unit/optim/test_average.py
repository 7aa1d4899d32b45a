"""The average of the weights: its numbers, its place, and what of it is state."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from evergrad_manifest.training import Ema
from evergrad_trainer.optim.average import Average


def make(
    values: list[float], *, dtype: torch.dtype = torch.float32, **settings: Any
) -> tuple[nn.Linear, Average]:
    module = nn.Linear(len(values), 1, bias=False, dtype=dtype)
    put(module, values)
    return module, Average({"model": module}, Ema.model_validate(settings))


def put(module: nn.Linear, values: list[float]) -> None:
    with torch.no_grad():
        module.weight.copy_(torch.tensor([values]))


def held(average: Average) -> list[float]:
    found: list[float] = average.tensors()["model.weight"].flatten().tolist()
    return found


def test_the_first_update_is_copied_and_later_ones_are_averaged() -> None:
    module, average = make([0.0, 0.0], decay=0.75)
    assert held(average) == [0.0, 0.0] and average.values() == {"updates": 0}
    for values in ([4.0, 8.0], [8.0, 0.0], [0.0, 4.0]):
        put(module, values)
        average.update()
    # 4 → 0.75 · 4 + 0.25 · 8 = 5 → 3.75; 8 → 6 → 0.75 · 6 + 0.25 · 4 = 5.5
    assert held(average) == [3.75, 5.5]
    assert average.values() == {"updates": 3}


def test_a_warm_up_starts_with_smaller_decay() -> None:
    _, average = make([1.0], decay=0.9, warmup=True)
    shares = [average.decay_after(n) for n in (0, 1, 2, 80, 81, 82)]
    assert shares == [0.0, 2 / 11, 3 / 12, 0.9, 0.9, 0.9]


def test_bf16_weights_have_an_average_that_still_changes() -> None:
    module, average = make([1.0], dtype=torch.bfloat16, decay=0.999)
    average.update()
    put(module, [2.0])
    average.update()
    assert average.tensors()["model.weight"].dtype == torch.float32
    assert held(average) == pytest.approx([1.001], abs=1e-7)


def test_the_average_temporarily_replaces_the_weights() -> None:
    module, average = make([1.0], decay=0.5)
    before = module.weight.detach()
    with average.in_place():
        assert module.weight.tolist() == [[1.0]]
    average.update()
    put(module, [3.0])
    average.update()
    with pytest.raises(RuntimeError), average.in_place():
        assert module.weight.tolist() == [[2.0]]
        # Code that reads the weights meanwhile gets the weights themselves.
        assert before.tolist() == [[3.0]]
        raise RuntimeError
    assert (
        module.weight.tolist() == [[3.0]] and module.weight.data_ptr() == before.data_ptr()
    )


def test_frozen_parameters_are_not_averaged() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    average = Average({"head": module}, Ema.model_validate({"decay": 0.5}))
    assert list(average.tensors()) == ["head.weight"]


def test_a_restored_average_continues_with_its_number_of_updates() -> None:
    module, average = make([1.0], decay=0.5)
    average.update()
    other_module, other = make([5.0], decay=0.5)
    other.tensors()["model.weight"].copy_(average.tensors()["model.weight"])
    other.load_values(average.values())
    for one, its in ((module, average), (other_module, other)):
        put(one, [2.0])
        its.update()
    assert held(other) == held(average) == [1.5]
    other.reset()
    assert held(other) == [0.0] and other.values() == {"updates": 0}
    other.update()
    assert held(other) == [2.0]


def test_a_part_of_a_sharded_weight_is_bit_equal_to_the_whole(
    third_of_three: DeviceMesh,
) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(10, 7, generator=generator) for _ in range(2))
    found = []
    for is_cut in (False, True):

        def place(whole: torch.Tensor, is_cut: bool = is_cut) -> torch.Tensor:
            if not is_cut:
                return whole.clone()
            return distribute_tensor(whole, third_of_three, [Shard(0)], src_data_rank=None)

        module = nn.Module()
        module.weight = nn.Parameter(place(first))
        average = Average({"model": module}, Ema.model_validate({"decay": 0.7}))
        average.update()
        with torch.no_grad():
            module.weight.copy_(place(second))
        average.update()
        tensor: Any = average.tensors()["model.weight"]
        found.append(tensor.to_local() if is_cut else tensor)
    # Rows 8 and 9 belong to the third rank.
    assert torch.equal(found[1], found[0][8:])
