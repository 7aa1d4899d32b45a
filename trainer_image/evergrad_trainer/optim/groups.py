"""Groups parameters that share a learning rate and a weight decay, and sets the learning rate of a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.model.spelling import nearest
from evergrad_manifest.training import Optimizer, ParameterGroup
from evergrad_trainer.base.errors import ModelError

Group = dict[str, Any]
"""A group of parameters in torch's form, with the ratio of its learning rate to the rate of the schedule."""

_RATIO = "learning_rate_ratio"
_MOST_NAMED = 4


def group_parameters(model: nn.Module, settings: Optimizer) -> list[Group]:
    """Group the trainable parameters of ``model`` by weight decay and ratio of the learning rate.

    Matrices come before vectors. Vectors are not decayed unless a group of the file sets their decay. Raises
    ModelError if a pattern of the file matches no trainable parameter.
    """
    raise_if(unmatched_patterns(model, settings.groups), ModelError)
    # A parameter belongs to the first group that matches it.
    chosen: dict[nn.Parameter, ParameterGroup] = {}
    for one in settings.groups:
        for name, parameter in _trained(model):
            if any(fnmatchcase(name, pattern) for pattern in one.parameters):
                chosen.setdefault(parameter, one)
    found: dict[tuple[float, float], list[nn.Parameter]] = {}
    for is_vector in (False, True):
        for parameter in model.parameters():
            if not parameter.requires_grad or (parameter.ndim < 2) != is_vector:
                continue
            group = chosen.get(parameter)
            decay = 0.0 if is_vector else settings.weight_decay
            if group is not None and group.weight_decay is not None:
                decay = group.weight_decay
            ratio = 1.0 if group is None else group.learning_rate_ratio
            found.setdefault((decay, ratio), []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": decay,
            "lr": settings.learning_rate * ratio,
            _RATIO: ratio,
        }
        for (decay, ratio), parameters in found.items()
    ]


def unmatched_patterns(model: nn.Module, groups: Sequence[ParameterGroup]) -> list[Problem]:
    """Return a problem for each pattern that matches no trained parameter of ``model`` and so has no
    effect."""
    names = [name for name, _ in _trained(model)]
    problems = []
    for index, group in enumerate(groups):
        for place, pattern in enumerate(group.parameters):
            if any(fnmatchcase(name, pattern) for name in names):
                continue
            near = nearest(pattern, names)
            guess = f"Did you mean {near}? " if near else ""
            problems.append(
                Problem(
                    f"spec.training.optimizer.groups[{index}].parameters[{place}]",
                    f"{pattern!r} names no parameter that is trained",
                    f"there are {len(names)}, such as {', '.join(names[:_MOST_NAMED])}",
                    f"{guess}Write a name, or a pattern such as *.bias",
                )
            )
    return problems


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return name and parameter of each trained parameter; a weight that two modules share has two names."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the learning rate of the next update: in each group, ``learning_rate`` times the group's ratio."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_RATIO, 1.0)


@dataclass(frozen=True)
class HeldParameters:
    """This rank's parts of a parameter with a gradient. They share the memory of the parameter's own
    tensors."""

    group: Group
    weights: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]


def parts_held(optimizer: torch.optim.Optimizer) -> Iterator[HeldParameters]:
    """Yield this rank's part of each parameter of ``optimizer`` that has a gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            state = optimizer.state[parameter]
            yield HeldParameters(
                group,
                _local(parameter.detach()),
                _local(parameter.grad),
                {slot: _local(tensor) for slot, tensor in state.items()},
            )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
