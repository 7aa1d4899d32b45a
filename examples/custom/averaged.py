"""A task of one's own: pretraining that counts right tokens, and evaluates an average of its weights, too."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.func import functional_call
from torch.nn import functional

from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import (
    Evaluator,
    Loss,
    Modules,
    Prepared,
    Section,
    Stage,
    Tensors,
    full_tensor,
)


class Options(Section):
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the average that stays at each update."""


class Averaged(Pretrain):
    """Everything that is not written here is pretraining's."""

    Options: ClassVar[type[Section]] = Options
    metrics: ClassVar[Mapping[str, str]] = {"accuracy": "Share of right guesses of a token."}

    def build(self, build_model: Callable[[], nn.Module]) -> Modules:
        modules = super().build(build_model)
        weights = modules.trained["model"].named_parameters()
        modules.kept = {name: torch.empty_like(weight) for name, weight in weights}
        return modules

    def enter(self, modules: Modules, stage: Stage) -> None:
        for name, weight in modules.trained["model"].named_parameters():
            modules.kept[name].copy_(full_tensor(weight))

    def after_update(self, modules: Modules, metrics: Mapping[str, float]) -> None:
        for name, weight in modules.trained["model"].named_parameters():
            modules.kept[name].lerp_(full_tensor(weight), 1 - self.setup.options.decay)

    def loss(self, modules: Modules, batch: Tensors, stage: Stage) -> Loss:
        output = modules.trained["model"](input_ids=batch["input_ids"])
        return sums(output.logits, batch["labels"])

    def evaluators(self, prepared: Prepared) -> Mapping[str, Evaluator]:
        found = dict(super().evaluators(prepared))
        if sources := [source for one in found.values() for source in one.sources]:
            found["average"] = Evaluator(sources, measure=loss_of_average)
        return found


def loss_of_average(modules: Modules, batch: Tensors, stage: Stage) -> Loss:
    model, inputs = modules.trained["model"], {"input_ids": batch["input_ids"]}
    return sums(functional_call(model, modules.kept, kwargs=inputs).logits, batch["labels"])


def sums(logits: torch.Tensor, labels: torch.Tensor) -> Loss:
    flat = logits.flatten(0, 1).float()
    loss = functional.cross_entropy(flat, labels.flatten(), reduction="sum")
    return Loss(loss, {"accuracy": (logits.argmax(-1) == labels).sum()})
