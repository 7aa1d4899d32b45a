"""A task of one's own: pretraining that counts right tokens, and evaluates an average of its weights, too."""

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import nn
from torch.func import functional_call

from evergrad_trainer import task
from evergrad_trainer.recipes.pretrain import Pretrain
from evergrad_trainer.task import Tensors


class Options(task.Section):
    decay: float = Field(default=0.9, ge=0, lt=1)
    """Share of the average that stays at each update."""


class Averaged(Pretrain):
    """Everything that is not written here is pretraining's."""

    Options: ClassVar[type[task.Section]] = Options
    metrics: ClassVar[Mapping[str, str]] = {"accuracy": "Share of right guesses."}

    def build(self, build_model: Callable[[], nn.Module]) -> task.Modules:
        modules = super().build(build_model)
        weights = modules.trained["model"].named_parameters()
        modules.kept = {name: torch.empty_like(weight) for name, weight in weights}
        return modules

    def enter(self, modules: task.Modules, stage: task.Stage) -> None:
        for name, weight in modules.trained["model"].named_parameters():
            modules.kept[name].copy_(task.full_tensor(weight))

    def after_update(self, modules: task.Modules, metrics: Mapping[str, float]) -> None:
        for name, weight in modules.trained["model"].named_parameters():
            modules.kept[name].lerp_(task.full_tensor(weight), 1 - self.setup.options.decay)

    def loss(self, modules: task.Modules, batch: Tensors, stage: task.Stage) -> task.Loss:
        output = modules.trained["model"](input_ids=batch["input_ids"])
        return sums(output.logits, batch["labels"])

    def evaluators(self, prepared: task.Prepared) -> Mapping[str, task.Evaluator]:
        found = dict(super().evaluators(prepared))
        if sources := [source for one in found.values() for source in one.sources]:
            found["average"] = task.Evaluator(sources, measure=loss_of_average)
        return found


def loss_of_average(modules: task.Modules, batch: Tensors, stage: task.Stage) -> task.Loss:
    model, inputs = modules.trained["model"], {"input_ids": batch["input_ids"]}
    return sums(functional_call(model, modules.kept, kwargs=inputs).logits, batch["labels"])


def sums(logits: torch.Tensor, labels: torch.Tensor) -> task.Loss:
    flat = logits.flatten(0, 1).float()
    loss = nn.functional.cross_entropy(flat, labels.flatten(), reduction="sum")
    return task.Loss(loss, {"accuracy": (logits.argmax(-1) == labels).sum()})
