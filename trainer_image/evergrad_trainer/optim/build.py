"""Builds the optimizer that the file names.

Each optimizer keeps its state in ``optimizer.state``, which is allocated immediately and filled with zeros,
so that a checkpoint can be loaded into it and memory does not grow in the first step. Between two steps the
optimizer changes nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import torch
from torch import nn

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.adamw import adamw_over
from evergrad_trainer.optim.elementwise import build_lion, build_sgd
from evergrad_trainer.optim.groups import Group, group_parameters
from evergrad_trainer.optim.whole_tensors import build_adafactor, build_muon

Builder = Callable[[nn.Module, Sequence[Group], Optimizer], torch.optim.Optimizer]

OPTIMIZERS: Final[Mapping[str, Builder]] = {
    "adamw": lambda model, groups, settings: adamw_over(groups, settings),
    "lion": lambda model, groups, settings: build_lion(groups, settings),
    "sgd": lambda model, groups, settings: build_sgd(groups, settings),
    "muon": build_muon,
    "adafactor": lambda model, groups, settings: build_adafactor(groups, settings),
}
"""Builder of an optimizer over groups of parameters, by ``spec.training.optimizer.type``."""


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Build the optimizer of ``settings`` over the trainable parameters of ``model``.

    Raises ModelError if a pattern of a group in the file matches no trainable parameter.
    """
    groups = group_parameters(model, settings)
    return OPTIMIZERS[settings.type](model, groups, settings)
