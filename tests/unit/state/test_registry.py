"""The registered parts are saved, restored, transferred, reset and compared, under the names that checkpoints
have always had."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from small_model import Small, train
from torch import nn

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.adamw import build_adamw
from evergrad_trainer.state.providers import (
    KeptTensors,
    ModuleState,
    OptimizerState,
    module_tensors,
)
from evergrad_trainer.state.registry import (
    MAX_VALUES_BYTES,
    MODEL,
    OPTIMIZER,
    Agreement,
    Registry,
    TensorSpec,
    from_extra,
    to_extra,
)

SETTINGS = Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0.5})
NAMES = ["embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]


class Notes:
    """A provider of values alone."""

    def __init__(self, **values: Any) -> None:
        self.held: Mapping[str, Any] = values

    def tensors(self) -> Mapping[str, torch.Tensor]:
        return {}

    def values(self) -> Mapping[str, Any]:
        return self.held

    def load_values(self, values: Mapping[str, Any]) -> None:
        self.held = values

    def reset(self) -> None:
        self.held = {}


def build(
    model: Small, optimizer: torch.optim.Optimizer | None = None
) -> tuple[Registry, torch.optim.Optimizer]:
    optimizer = optimizer or build_adamw(model, SETTINGS)
    registry = Registry()
    registry.register(MODEL, ModuleState(model, initial=lambda: module_tensors(Small())))
    registry.register(OPTIMIZER, OptimizerState(optimizer, dict(model.named_parameters())))
    return registry, optimizer


def copy_state(source: Registry, target: Registry) -> None:
    for name, tensor in target.tensors().items():
        tensor.copy_(source.tensors()[name])
    target.load_values(source.values())


def test_checkpoint_tensor_names_are_unchanged() -> None:
    registry, _ = build(Small())
    moments = {
        f"optimizer.{name}.{moment}"
        for name in NAMES
        for moment in ("exp_avg", "exp_avg_sq")
    }
    assert set(registry.tensors()) == {f"model.{name}" for name in NAMES} | moments | {
        "model.count"
    }
    assert registry.values() == {"optimizer": {"step": 0.0}}


def test_tied_weights_are_stored_once() -> None:
    model = Small()
    model.head.weight = model.embedding.weight
    tensors = build(model)[0].tensors()
    assert "model.embedding.weight" in tensors and "model.head.weight" not in tensors


def test_a_frozen_parameter_is_stored_and_has_no_moments() -> None:
    model = Small()
    model.embedding.weight.requires_grad_(False)
    tensors = build(model)[0].tensors()
    assert (
        "model.embedding.weight" in tensors
        and "optimizer.embedding.weight.exp_avg" not in tensors
    )


OPTIMIZERS = {
    "AdamW": lambda model: build_adamw(model, SETTINGS),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.1),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_moved_to_another_process_continues_bit_equal_with_any_optimizer(
    name: str,
) -> None:
    model, other = Small(), Small()
    first, optimizer = build(model, OPTIMIZERS[name](model))
    second, resumed = build(other, OPTIMIZERS[name](other))
    # Torch's own optimizers allocate their state in the first step.
    train(model, optimizer, 3)
    train(other, resumed, 1)
    copy_state(first, second)
    train(model, optimizer, 2)
    train(other, resumed, 2)
    assert first.values() == second.values()
    mine, theirs = first.tensors(), second.tensors()
    assert mine.keys() == theirs.keys() and all(
        torch.equal(mine[key], theirs[key]) for key in mine
    )


def test_scalars_that_differ_between_parameters_are_stored_separately() -> None:
    model = Small()
    registry, optimizer = build(model)
    optimizer.state[model.head.bias]["step"].fill_(7.0)
    values = registry.values()
    assert (
        values["optimizer"]["step"]["head.bias"] == 7.0
        and values["optimizer"]["step"]["head.weight"] == 0.0
    )
    other, fresh = build(Small())
    other.load_values(values)
    assert other.values() == values
    assert fresh.state_dict()["state"][4]["step"] == 7.0


def test_a_reset_gives_the_initial_bits() -> None:
    model = Small()
    registry, optimizer = build(model)
    train(model, optimizer, 3)
    registry.reset()
    expected, _ = build(Small())
    mine, theirs = registry.tensors(), expected.tensors()
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert registry.values() == expected.values()


def test_kept_tensors_are_stored_and_reset() -> None:
    average = torch.ones(3)
    registry = Registry()
    registry.register(
        "kept",
        KeptTensors(
            {"average": average}, initial=lambda: {"average": torch.full((3,), 2.0)}
        ),
    )
    assert registry.tensors()["kept.average"] is average
    registry.reset()
    assert average.tolist() == [2.0, 2.0, 2.0]


def test_whole_tensors_are_described_in_name_order() -> None:
    specs = build(Small())[0].specs()
    assert [spec.name for spec in specs] == sorted(spec.name for spec in specs)
    assert specs[0] == TensorSpec("model.count", (2,), torch.float32)


@pytest.mark.acceptance("8d-16e", "input-O-73")
@pytest.mark.parametrize("name", ["", "a.b", "model"])
def test_a_name_is_unique_and_has_no_dot(name: str) -> None:
    with pytest.raises(ValueError, match="unique and without dots"):
        build(Small())[0].register(name, Notes())


def test_too_many_values_are_refused_by_the_name_of_their_provider() -> None:
    registry = Registry()
    registry.register("observers", Notes(text="x" * MAX_VALUES_BYTES))
    with pytest.raises(
        ValueError, match=r"state of 'observers': 262,156 bytes of values; at most 262,144"
    ):
        registry.values()


def test_a_new_provider_is_notified_that_the_state_is_older() -> None:
    registry = Registry()
    notes = Notes(a=1)
    registry.register("notes", notes)
    registry.load_values({"unknown": {"b": 2}})
    assert notes.held == {}


def test_values_are_unchanged_by_the_layout_of_a_manifest() -> None:
    values: dict[str, Mapping[str, Any]] = {
        "counters": {"step": 8, "best": None}, "cursor": {"docs": 3}, "description": {"config": {}},
        "optimizer": {"step": 7.0}, "observers": {"slow": {"count": 2}},
    }  # fmt: skip
    extra = to_extra(values)
    assert (extra["step"], extra["cursor"], extra["model"]) == (
        8,
        {"docs": 3},
        {"config": {}},
    )
    assert from_extra(extra) == values


@pytest.mark.parametrize(("counted", "step"), [({"updates": 5}, 5.0), ({}, 8.0)])
def test_an_older_manifest_gives_adam_the_number_of_updates(
    counted: dict[str, int], step: float
) -> None:
    extra = {"step": 8, "evaluated_step": 8, "best": None, **counted, "cursor": {"docs": 3}}
    values = from_extra(extra)
    assert values["optimizer"] == {"step": step} and values["cursor"] == {"docs": 3}


def test_values_that_must_agree_are_compared_and_missing_ones_in_older_states_are_not() -> (
    None
):
    compared: list[object] = []
    agreement = Agreement(value=lambda: {"docs": 3}, check=compared.append)
    agreement.load_values({"docs": 2})
    agreement.load_values({})
    assert compared == [{"docs": 2}]


def test_a_reset_gives_each_rank_its_part_of_the_initial_weights() -> None:
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    try:
        model, mesh = Small(), DeviceMesh("cpu", [0])
        whole = model.head.weight.detach().clone()
        cut = distribute_tensor(torch.zeros_like(whole), mesh, [Shard(0)])
        model.head.weight = nn.Parameter(cut)
        registry = build(model)[0]
        registry.reset()
        assert isinstance(model.head.weight, DTensor)
        assert torch.equal(model.head.weight.full_tensor(), whole)
    finally:
        distributed.destroy_process_group()
