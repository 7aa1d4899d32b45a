"""An exponential moving average of the trained weights: a part of the run's state beside them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Ema, Training
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.state.registry import Values

UPDATES: Final = "updates"
TRAINED: Final = "trained"
AVERAGE: Final = "average"
"""Which weights of a checkpoint are meant, as commands name them."""


class Average:
    """Averages what the optimizer trains, over the updates that were made.

    The first update sets it to the weights; each further one makes it d · average + (1 - d) · weights. It is
    in fp32 whatever the weights are, because 1 - d of a weight is below the precision of bf16. Each element
    depends on its own weight alone, so that a sharded average has the bits of a whole one.
    """

    def __init__(self, modules: Mapping[str, nn.Module], settings: Ema) -> None:
        """``modules``: those that are trained, where their tensors will stay, by the names of the state."""
        self._settings = settings
        self._weights = {
            f"{name}.{own}": parameter
            for name, module in modules.items()
            for own, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._average = {
            name: torch.zeros_like(weight.detach(), dtype=torch.float32)
            for name, weight in self._weights.items()
        }
        self._updates = 0

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensors, under the names that the weights have in the state."""
        return self._average

    def values(self) -> Values:
        """Return how many updates are in the average."""
        return {UPDATES: self._updates}

    def load_values(self, values: Values) -> None:
        """Take over how many updates are in it."""
        self._updates = int(values.get(UPDATES, 0))

    def reset(self) -> None:
        """Forget all updates."""
        self._updates = 0
        for tensor in self._average.values():
            tensor.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after an update."""
        decay = self.decay_after(self._updates)
        for name, weight in self._weights.items():
            # Operations that round once each: a fused one may compute the end of a tensor otherwise than its
            # middle, and an element would depend on where its tensor is cut.
            share = _local(weight.detach()).float() * (1.0 - decay)
            _local(self._average[name]).mul_(decay).add_(share)
        self._updates += 1

    def decay_after(self, updates: int) -> float:
        """Share of the average that is left by the next update after ``updates``."""
        if updates == 0:
            return 0.0
        if not self._settings.warmup:
            return self._settings.decay
        return min(self._settings.decay, (1 + updates) / (10 + updates))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Compute with the average in the place of the weights while this lasts, as soon as there is one.

        The weights stay where they are in memory: a save that is under way reads them.
        """
        if self._updates == 0:
            yield
            return
        before = {name: weight.data for name, weight in self._weights.items()}
        try:
            for name, weight in self._weights.items():
                weight.data = self._average[name].to(weight.dtype)
            yield
        finally:
            for name, weight in self._weights.items():
                weight.data = before[name]


def check_has_average(training: Training, weights: str, *, where: str) -> None:
    """Raises RunDirectoryError where the average of a run is asked for, and it keeps none."""
    if weights == AVERAGE and training.ema is None:
        what, why = "has no average of its weights", "spec.training.ema is not set"
        raise RunDirectoryError(Problem(where, what, why, f"Use --weights {TRAINED}"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
