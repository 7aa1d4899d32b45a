"""Decay groups, and updates equal to torch's."""

import pytest
import torch
from small_model import Small, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.adamw import MOMENTS, build_adamw
from evergrad_trainer.optim.groups import set_learning_rate

SETTINGS = Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0.5})


@pytest.mark.acceptance("number-G-75")
def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = Small()
    optimizer = build_adamw(model, SETTINGS)
    decay = {
        id(p): group["weight_decay"]
        for group in optimizer.param_groups
        for p in group["params"]
    }
    by_name = {name: decay[id(parameter)] for name, parameter in model.named_parameters()}
    assert by_name == {
        "embedding.weight": 0.5,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "head.weight": 0.5,
        "head.bias": 0.0,
    }


def test_a_frozen_parameter_is_not_updated_and_has_no_moments() -> None:
    model = Small()
    model.embedding.weight.requires_grad_(False)
    before = model.embedding.weight.clone()
    optimizer = build_adamw(model, SETTINGS)
    train(model, optimizer, 2)
    assert torch.equal(model.embedding.weight, before)
    assert model.embedding.weight not in optimizer.state


@pytest.mark.acceptance("number-G-75")
@pytest.mark.capability("A-10", "A-45", "T-54")
def test_updates_equal_those_of_torch() -> None:
    model, other = Small(), Small()
    ours = build_adamw(
        model, Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0})
    )
    theirs = torch.optim.AdamW(
        other.parameters(),
        lr=0.1,
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,
    )
    train(model, ours, 3)
    train(other, theirs, 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_learning_rate_is_set_for_every_group() -> None:
    optimizer = build_adamw(Small(), SETTINGS)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_shard_is_updated_bit_equal_to_the_whole(third_of_three: DeviceMesh) -> None:
    torch.manual_seed(0)
    # Rows of 77 elements, so that few shards begin at a cache line. The last rank has fewer rows, or none.
    whole = nn.ParameterList([torch.randn(300, 77), torch.randn(50), torch.randn(4, 77)])
    shards = nn.ParameterList([DTensor.from_local(part(p), third_of_three, [Shard(0)], shape=p.shape, stride=p.stride())
        for p in whole])  # fmt: skip
    ours, theirs = build_adamw(shards, SETTINGS), build_adamw(whole, SETTINGS)
    for _ in range(3):
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            shard.grad = DTensor.from_local(
                part(parameter.grad),
                third_of_three,
                [Shard(0)],
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        ours.step()
        theirs.step()
    for parameter, shard in zip(whole, shards, strict=True):
        assert torch.equal(shard.to_local(), part(parameter.detach()))
        mine, their = ours.state[shard], theirs.state[parameter]
        assert all(
            torch.equal(mine[moment].to_local(), part(their[moment])) for moment in MOMENTS
        )
        assert mine["step"] == their["step"] == 3


def part(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of rank 2 of 3."""
    rows = -(-tensor.shape[0] // 3)
    return tensor[2 * rows :].clone()
