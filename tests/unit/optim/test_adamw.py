"""Decay groups, updates equal to torch's, and a state that is a flat dictionary."""

import torch
from torch import nn

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.adamw import build_adamw, set_learning_rate, set_updates, state_tensors

SETTINGS = Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0.5})


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embedding(ids)))
        return hidden


def train(model: Small, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.tensor([0, 1, 2])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_matrices_are_decayed_and_vectors_are_not() -> None:
    model = Small()
    optimizer = build_adamw(model, SETTINGS)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
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
    assert "optimizer.embedding.weight.exp_avg" not in state_tensors(model, optimizer)
    assert "model.embedding.weight" in state_tensors(model, optimizer)


def test_the_state_holds_what_is_saved_and_nothing_else() -> None:
    model = Small()
    state = state_tensors(model, build_adamw(model, SETTINGS))
    names = ["embedding.weight", "norm.weight", "norm.bias", "head.weight", "head.bias"]
    moments = {f"optimizer.{name}.{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq")}
    assert set(state) == {f"model.{name}" for name in names} | moments | {"model.count"}
    assert set(state_tensors(model, None)) == {f"model.{name}" for name in names} | {"model.count"}


def test_tied_weights_are_saved_once() -> None:
    model = Small()
    model.head.weight = model.embedding.weight
    state = state_tensors(model, build_adamw(model, SETTINGS))
    assert "model.embedding.weight" in state and "model.head.weight" not in state


def test_a_state_copied_into_a_fresh_optimizer_goes_on_bit_for_bit() -> None:
    model = Small()
    optimizer = build_adamw(model, SETTINGS)
    train(model, optimizer, 3)
    saved = {key: value.clone() for key, value in state_tensors(model, optimizer).items()}
    train(model, optimizer, 2)

    other = Small()
    resumed = build_adamw(other, SETTINGS)
    with torch.no_grad():
        for key, target in state_tensors(other, resumed).items():
            target.copy_(saved[key])
    set_updates(resumed, 3)
    train(other, resumed, 2)
    expected = state_tensors(model, optimizer)
    assert all(torch.equal(value, expected[key]) for key, value in state_tensors(other, resumed).items())


def test_without_the_step_count_the_bias_correction_would_differ() -> None:
    model, other = Small(), Small()
    counted, uncounted = build_adamw(model, SETTINGS), build_adamw(other, SETTINGS)
    set_updates(counted, 100)
    train(model, counted, 1)
    train(other, uncounted, 1)
    assert not torch.equal(model.head.weight, other.head.weight)


def test_updates_are_torchs_own() -> None:
    model, other = Small(), Small()
    ours = build_adamw(model, Optimizer.model_validate({"learningRate": 0.1, "weightDecay": 0}))
    theirs = torch.optim.AdamW(
        other.parameters(), lr=0.1, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )
    train(model, ours, 3)
    train(other, theirs, 3)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_the_learning_rate_is_set_for_every_group() -> None:
    optimizer = build_adamw(Small(), SETTINGS)
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
