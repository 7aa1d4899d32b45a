"""A scale of the loss for products in fp16, lowered where gradients overflow and raised while they fit."""

from collections.abc import Mapping
from typing import Final

import torch

from evergrad_trainer.state.registry import Values

GROWTH_INTERVAL: Final = 2000
"""Updates in a row after which the scale is doubled."""
_FIRST: Final = 2.0**16
_LARGEST: Final = 2.0**24
"""Sums of what is scaled stay far inside of fp32, however long gradients are zero."""
_SMALLEST: Final = 1.0
"""Gradients that overflow without a scale are those of a run that diverges."""


class LossScale:
    """Scales the loss before the backward pass, so that small gradients are not lost in fp16.

    torch's GradScaler has the same numbers, but decides by what a rank finds in its own gradients, on its
    device: a shard of one rank may overflow where others are finite, and an update would be made on some
    ranks alone. Here all ranks decide by the norm of the sums that they have agreed on. The scale is a power
    of two, so that neither scaling nor its undoing rounds.

    Scale and count are one tensor, so that replicas are compared with them and checkpoints have their
    checksum.
    """

    def __init__(
        self, device: torch.device, *, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._growth_interval = growth_interval
        self._stored = torch.zeros(2, dtype=torch.float64, device=device)
        # The state as it is stored, so that no step waits for a device to know it; None: not read yet.
        self._known: tuple[float, int] | None = None
        self.reset()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensor: the scale, and the updates since it was last changed."""
        return {"scale": self._stored}

    def values(self) -> Values:
        """Return nothing: all of it is a tensor."""
        return {}

    def load_values(self, values: Values) -> None:
        """Read the tensor again when it is next asked for: it may not have arrived yet."""
        self._known = None

    def reset(self) -> None:
        """Go back to the scale of the beginning."""
        self._store(_FIRST, 0)

    @property
    def value(self) -> float:
        """The factor of the loss of the next step."""
        return self._read()[0]

    @property
    def can_fall(self) -> bool:
        """Whether a smaller scale may help where gradients overflow."""
        return self.value > _SMALLEST

    def follow(self, skipped: str | None) -> None:
        """Take note of a finished step. ``skipped``: one of causes.SKIPS, or None for an update.

        A step that was skipped for another reason says nothing about the scale.
        """
        scale, count = self._read()
        if skipped == "overflow":
            self._store(max(_SMALLEST, scale / 2), 0)
        elif skipped is None and count + 1 < self._growth_interval:
            self._store(scale, count + 1)
        elif skipped is None:
            self._store(min(_LARGEST, 2 * scale), 0)

    def _read(self) -> tuple[float, int]:
        if self._known is None:
            scale, count = self._stored.tolist()
            self._known = scale, int(count)
        return self._known

    def _store(self, scale: float, count: int) -> None:
        self._known = scale, count
        # In place, and without a wait for an accelerator.
        for index, number in enumerate(self._known):
            self._stored[index] = number


def build_loss_scale(precision: str, device: torch.device) -> LossScale | None:
    """The scale of what is trained in ``precision``; None where nothing is in fp16."""
    return LossScale(device) if precision == "fp16-autocast" else None
