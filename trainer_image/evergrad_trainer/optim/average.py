"""An exponential moving average of the trained weights, which is a part of the run's state."""

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
"""Names of the two kinds of weights of a checkpoint, as in commands."""


class Average:
    """Averages the trained weights over the updates.

    The first update sets the average to the weights; each further update sets it to
    d · average + (1 - d) · weights. The average is always in fp32, because (1 - d) times a weight is below
    the precision of bf16. Each element depends only on its own weight, so a sharded average is bitwise equal
    to a whole average.
    """

    def __init__(self, modules: Mapping[str, nn.Module], settings: Ema) -> None:
        """``modules``: the trained modules by their names in the state. Their tensors must not move later."""
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
        """Return the number of updates in the average."""
        return {UPDATES: self._updates}

    def load_values(self, values: Values) -> None:
        """Load the number of updates in the average."""
        self._updates = int(values.get(UPDATES, 0))

    def reset(self) -> None:
        """Reset the number of updates to 0."""
        self._updates = 0
        for tensor in self._average.values():
            tensor.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an update to the average."""
        decay = self.decay_after(self._updates)
        for name, weight in self._weights.items():
            # Use operations that round once each. A fused operation may compute the end of a tensor
            # differently from its middle, so that an element would depend on the shards of its tensor.
            share = _local(weight.detach()).float() * (1.0 - decay)
            _local(self._average[name]).mul_(decay).add_(share)
        self._updates += 1

    def decay_after(self, updates: int) -> float:
        """Return the decay d of the next update after ``updates`` updates."""
        if updates == 0:
            return 0.0
        if not self._settings.warmup:
            return self._settings.decay
        return min(self._settings.decay, (1 + updates) / (10 + updates))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside the block, the model computes with the average, if there is one, instead of the weights.

        The weights stay at their place in memory, because a running save may read them.
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
    """Raise RunDirectoryError if ``weights`` is ``average`` and the run keeps no average."""
    if weights == AVERAGE and training.ema is None:
        what, why = "has no average of its weights", "spec.training.ema is not set"
        raise RunDirectoryError(Problem(where, what, why, f"Use --weights {TRAINED}"))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
