"""Updates of each optimizer computed by hand, equal for any split of a tensor, and its state before the first
step."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_model import Small, train
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from evergrad_manifest.model.fields import choices_of, fields_of
from evergrad_manifest.training import Optimizer
from evergrad_trainer.base.errors import ModelError
from evergrad_trainer.optim.build import OPTIMIZERS, build_optimizer
from evergrad_trainer.optim.groups import set_learning_rate
from evergrad_trainer.state.providers import OptimizerState

ALL = sorted(OPTIMIZERS)


def settings(**values: Any) -> Optimizer:
    return Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0, **values})


def weights_after(
    gradients: list[list[float]], start: list[float], **values: Any
) -> list[list[float]]:
    """The weights of a vector after each of the gradients."""
    vector = nn.ParameterList([torch.tensor(start, dtype=torch.float64)])
    optimizer = build_optimizer(vector, settings(**values))
    found = []
    for gradient in gradients:
        vector[0].grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
        found.append(vector[0].tolist())
    return found


def test_each_optimizer_type_of_the_manifest_is_registered() -> None:
    assert set(choices_of(fields_of(Optimizer)["type"])) == set(OPTIMIZERS)


def test_lion_updates_by_the_sign_of_a_mean() -> None:
    # m = 0: sign(0.1 g) = sign(g); m becomes 0.01 g = (0.02, -0.01, 0).
    # Then sign(0.9 m + 0.1 g) = sign(0.018 - 0.01, -0.009 + 0.02, 0) = (1, 1, 0).
    found = weights_after(
        [[2, -1, 0], [-0.1, 0.2, 0]], [1, 1, 1], type="lion", betas=[0.9, 0.99]
    )
    assert found == [pytest.approx([0.9, 1.1, 1]), pytest.approx([0.8, 1.0, 1])]


def test_sgd_sums_decaying_gradients() -> None:
    # m = 2, then 0.5 * 2 + 1 = 2; with Nesterov g + 0.5 m: 2 + 1 = 3, then 1 + 1 = 2.
    plain = weights_after([[2], [1]], [1], type="sgd", momentum=0.5)
    ahead = weights_after([[2], [1]], [1], type="sgd", momentum=0.5, nesterov=True)
    none = weights_after([[2], [1]], [1], type="sgd", momentum=0)
    assert plain == [pytest.approx([0.8]), pytest.approx([0.6])]
    assert ahead == [pytest.approx([0.7]), pytest.approx([0.5])]
    assert none == [pytest.approx([0.8]), pytest.approx([0.7])]


@pytest.mark.parametrize("kind", ["adamw", "lion", "sgd"])
def test_weight_decay_is_applied_before_the_update_and_not_to_the_gradient(
    kind: str,
) -> None:
    group = {"parameters": ["0"], "weightDecay": 0.5}
    # The gradient is 0: the remaining factor is 1 - 0.1 * 0.5 = 0.95, and 0.9025 after two steps.
    found = weights_after([[0], [0]], [1], type=kind, groups=[group])
    assert found == [pytest.approx([0.95]), pytest.approx([0.9025])]


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_equals_torch(nesterov: bool) -> None:
    model, other = Small(), Small()
    ours = build_optimizer(model, settings(type="sgd", nesterov=nesterov))
    theirs = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    train(model, ours, 4)
    train(other, theirs, 4)
    for mine, their in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-6, atol=1e-7)


def test_adafactor_divides_by_the_roots_of_row_and_column_means() -> None:
    model = nn.ParameterList([torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)])
    optimizer = build_optimizer(model, settings(type="adafactor"))
    model[0].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    optimizer.step()
    # Means of squares: rows 2.5 and 12.5, columns 5 and 10, of the rows 7.5. The first step has β2 = 0.
    # Estimates: 2.5 * 5 / 7.5 = 5/3, 10/3, 25/3, 50/3; updates 1/√(5/3), 2/√(10/3), 3/√(25/3), 4/√(50/3).
    updates = [1 / math.sqrt(5 / 3), 2 / math.sqrt(10 / 3), 3 / math.sqrt(25 / 3)]
    updates.append(4 / math.sqrt(50 / 3))
    # Their root mean square is √0.96, below the threshold 1. The rate is 0.1 times that of the weights, 2.5.
    assert math.sqrt(sum(one * one for one in updates) / 4) == pytest.approx(
        math.sqrt(0.96)
    )
    expected = [3 - 0.25 * updates[0], 4 - 0.25 * updates[1]]
    expected += [-0.25 * updates[2], -0.25 * updates[3]]
    assert model[0].flatten().tolist() == pytest.approx(expected)
    state = optimizer.state[model[0]]
    assert state["row_var"].flatten().tolist() == pytest.approx([2.5, 12.5])
    assert state["col_var"].flatten().tolist() == pytest.approx([5, 10])


def polynomial_of_singular_values(values: torch.Tensor) -> torch.Tensor:
    """Five rounds of Jordan's quintic, on singular values that begin with norm 1."""
    found = values / values.norm()
    for _ in range(5):
        found = 3.4445 * found - 4.7750 * found**3 + 2.0315 * found**5
    return found


@pytest.mark.capability("T-X8")
def test_muon_equalises_the_singular_values_of_a_matrix() -> None:
    torch.manual_seed(0)
    left, _ = torch.linalg.qr(torch.randn(6, 6))
    right, _ = torch.linalg.qr(torch.randn(4, 4))
    values = torch.tensor([4.0, 2.0, 1.0, 0.5])
    model = nn.ParameterList([torch.zeros(6, 4)])
    optimizer = build_optimizer(model, settings(type="muon"))
    model[0].grad = left[:, :4] @ torch.diag(values) @ right
    optimizer.step()
    # Momentum and Nesterov's look ahead only scale the first gradient. The rate is 0.1 * 0.2 * √6.
    expected = left[:, :4] @ torch.diag(polynomial_of_singular_values(values)) @ right
    expected *= -0.1 * 0.2 * math.sqrt(6)
    # Computed in bf16, of 8 bits.
    torch.testing.assert_close(model[0].detach(), expected, rtol=0.05, atol=0.001)
    assert (
        optimizer.state[model[0]]["momentum_buffer"] - 0.05 * model[0].grad
    ).abs().max() < 1e-6


def test_muon_leaves_embeddings_and_vectors_to_adamw() -> None:
    model = Small()
    optimizer = build_optimizer(model, settings(type="muon", betas=[0.8, 0.9]))
    slots = {name: set(optimizer.state[one]) for name, one in model.named_parameters()}
    adamw = {"step", "exp_avg", "exp_avg_sq"}
    assert slots.pop("head.weight") == {"momentum_buffer"}
    assert slots and set(map(frozenset, slots.values())) == {frozenset(adamw)}
    theirs = {tuple(one["betas"]) for one in optimizer.param_groups if "betas" in one}
    assert theirs == {(0.8, 0.9)}


def test_a_tied_head_counts_as_an_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 5)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Tied()
    optimizer = build_optimizer(model, settings(type="muon"))
    assert set(optimizer.state[model.inner.weight]) == {"momentum_buffer"}
    assert "exp_avg" in optimizer.state[model.head.weight]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "values",
    [{"type": "lion"}, {"type": "sgd"}, {"type": "sgd", "nesterov": True}],
    ids=str,
)
@given(data=st.data())
def test_any_split_is_bit_equal_to_the_whole(
    dtype: torch.dtype, values: dict[str, Any], data: st.DataObject
) -> None:
    total = data.draw(st.integers(1, 200))
    cut = data.draw(st.integers(0, total))
    source = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    start, *gradients = (torch.randn(total, generator=source).to(dtype) for _ in range(4))
    decayed = {"parameters": ["*"], "weightDecay": 0.1}

    def run(begin: int, end: int) -> torch.Tensor:
        model = nn.ParameterList([start[begin:end].clone()])
        optimizer = build_optimizer(model, settings(**values, groups=[decayed]))
        for gradient in gradients:
            model[0].grad = gradient[begin:end].clone()
            optimizer.step()
        return model[0].detach()

    assert torch.equal(torch.cat([run(0, cut), run(cut, total)]), run(0, total))


@pytest.mark.parametrize("kind", ["lion", "sgd"])
def test_a_shard_is_updated_bit_equal_to_the_whole(
    third_of_three: DeviceMesh, kind: str
) -> None:
    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[2 * -(-tensor.shape[0] // 3) :].clone()

    def cut(tensor: torch.Tensor) -> DTensor:
        shape, stride = tensor.shape, tensor.stride()
        return DTensor.from_local(
            part(tensor), third_of_three, [Shard(0)], shape=shape, stride=stride
        )

    torch.manual_seed(0)
    # The last rank has fewer rows, or none.
    whole = nn.ParameterList([torch.randn(300, 7), torch.randn(50), torch.randn(4, 7)])
    shards = nn.ParameterList([cut(one.detach()) for one in whole])
    ours = build_optimizer(shards, settings(type=kind, weightDecay=0.5))
    theirs = build_optimizer(whole, settings(type=kind, weightDecay=0.5))
    for _ in range(3):
        for parameter, shard in zip(whole, shards, strict=True):
            parameter.grad = torch.randn(parameter.shape)
            shard.grad = cut(parameter.grad)
        ours.step()
        theirs.step()
    for parameter, shard in zip(whole, shards, strict=True):
        assert torch.equal(shard.to_local(), part(parameter.detach()))
        for slot, tensor in theirs.state[parameter].items():
            assert torch.equal(ours.state[shard][slot].to_local(), part(tensor))


@pytest.mark.acceptance("number-G-75")
@pytest.mark.capability("G-75")
def test_a_group_has_its_own_rate_and_decay() -> None:
    model = Small()
    groups = [
        {"parameters": ["embedding.*"], "weightDecay": 0},
        {"parameters": ["*.bias", "head.?eight"], "learningRateRatio": 0.5},
        {"parameters": ["head.weight"], "weightDecay": 1},
    ]
    optimizer = build_optimizer(model, settings(weightDecay=0.1, groups=groups))
    set_learning_rate(optimizer, 0.25)
    found = {
        id(one): (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for one in group["params"]
    }
    assert {name: found[id(one)] for name, one in model.named_parameters()} == {
        "embedding.weight": (0.25, 0.0),
        "norm.weight": (0.25, 0.0),
        "norm.bias": (0.125, 0.0),
        "head.weight": (0.125, 0.1),
        "head.bias": (0.125, 0.0),
    }


def test_a_pattern_without_a_match_is_refused_with_the_nearest_name() -> None:
    groups = [
        {"parameters": ["*.bias"], "weightDecay": 0.5},
        {"parameters": ["*", "embeding.weight"], "weightDecay": 0},
    ]
    with pytest.raises(ModelError) as caught:
        build_optimizer(Small(), settings(groups=groups))
    assert str(caught.value) == (
        "spec.training.optimizer.groups[1].parameters[1]: 'embeding.weight' names no parameter that is trained; "
        "there are 5, such as embedding.weight, norm.weight, norm.bias, head.weight. Did you mean "
        "embedding.weight? Write a name, or a pattern such as *.bias."
    )


@pytest.mark.parametrize("kind", ALL)
def test_the_state_exists_before_the_first_step_and_keeps_its_memory(kind: str) -> None:
    model = Small()
    optimizer = build_optimizer(model, settings(type=kind))
    state = OptimizerState(optimizer, dict(model.named_parameters()))
    before, first = state.tensors(), state.values()
    assert before and all(not one.any() for one in before.values())
    train(model, optimizer, 2)
    after = state.tensors()
    assert {name: one.data_ptr() for name, one in after.items()} == {
        name: one.data_ptr() for name, one in before.items()
    }
    assert any(one.any() for one in after.values())
    state.reset()
    assert all(not one.any() for one in state.tensors().values())
    assert state.values() == first


@pytest.mark.parametrize("kind", ALL)
def test_a_copied_state_continues_bit_equal(kind: str) -> None:
    model, other = Small(), Small()
    optimizer = build_optimizer(model, settings(type=kind))
    train(model, optimizer, 3)
    follower = build_optimizer(other, settings(type=kind))
    mine = OptimizerState(optimizer, dict(model.named_parameters()))
    its = OptimizerState(follower, dict(other.named_parameters()))
    with torch.no_grad():
        for name, tensor in its.tensors().items():
            tensor.copy_(mine.tensors()[name])
        for target, source in zip(other.parameters(), model.parameters(), strict=True):
            target.copy_(source)
    its.load_values(mine.values())
    train(model, optimizer, 2)
    train(other, follower, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert its.values() == mine.values()


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_has_bf16_momentum_only_with_nesterov(nesterov: bool) -> None:
    """The manifest refuses the other variant, in which torch computes its update in the momentum's memory."""
    model = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, settings(type="muon", nesterov=nesterov))
    expected, before = (
        torch.zeros(4, 4, dtype=torch.bfloat16),
        model.weight.detach().clone(),
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        model.weight.grad = torch.randn(4, 4, generator=generator).bfloat16()
        expected.lerp_(model.weight.grad, 0.05)
        optimizer.step()
    kept = optimizer.state[model.weight]["momentum_buffer"]
    assert torch.equal(kept, expected) is nesterov
    assert not torch.equal(model.weight, before) and bool(model.weight.isfinite().all())
