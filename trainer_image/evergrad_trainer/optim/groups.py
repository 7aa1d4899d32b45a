"""Which parameters share a learning rate and a weight decay, and how the rate of a step reaches them."""

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
"""A group of parameters as torch has them, with the ratio of its learning rate to the schedule's."""

_RATIO = "learning_rate_ratio"
_MOST_NAMED = 4


def group_parameters(model: nn.Module, settings: Optimizer) -> list[Group]:
    """The trainable parameters of ``model`` by what they have in common: decay, and ratio of the rate.

    Matrices come before vectors, which are not decayed unless a group of the file says so. Raises ModelError
    where a pattern of the file names no trainable parameter.
    """
    raise_if(unmatched_patterns(model, settings.groups), ModelError)
    # The first group that names a parameter has it.
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
    """A problem for each pattern that names no trained parameter of ``model``, and so would do nothing."""
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
    """Name and parameter of what is trained; a weight that two modules share has two names."""
    return [
        (name, parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if parameter.requires_grad
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The rate of the next update, for each group at its ratio."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get(_RATIO, 1.0)


@dataclass(frozen=True)
class HeldParameters:
    """This rank's parts of each parameter that has a gradient; all share the memory of the whole's."""

    group: Group
    weights: torch.Tensor
    gradient: torch.Tensor
    state: Mapping[str, torch.Tensor]


def parts_held(optimizer: torch.optim.Optimizer) -> Iterator[HeldParameters]:
    """Each parameter of ``optimizer`` that has a gradient, as far as this rank holds it."""
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
