"""A loss scale for products in fp16: it falls if gradients overflow, and grows while they are finite."""

from collections.abc import Mapping
from typing import Final

import torch

from evergrad_trainer.state.registry import Values

GROWTH_INTERVAL: Final = 2000
"""Number of consecutive updates after which the scale is doubled."""
_FIRST: Final = 2.0**16
_LARGEST: Final = 2.0**24
"""Upper limit, so that scaled sums stay within fp32 even if gradients are zero for a long time."""
_SMALLEST: Final = 1.0
"""Lower limit: if gradients overflow even without a scale, the run diverges."""


class LossScale:
    """Scales the loss before the backward pass, so that small gradients are not lost in fp16.

    torch's GradScaler uses the same numbers, but each rank decides by its own gradients. A shard of one rank
    may overflow while the others are finite, and then only some ranks would make the update. Here all ranks
    decide by the norm of the reduced gradients, which is the same on all ranks. The scale is a power of two,
    so that neither scaling nor unscaling rounds.

    Scale and count are stored in one tensor, so that comparisons of replicas and checksums of checkpoints
    include them.
    """

    def __init__(
        self, device: torch.device, *, growth_interval: int = GROWTH_INTERVAL
    ) -> None:
        self._growth_interval = growth_interval
        self._stored = torch.zeros(2, dtype=torch.float64, device=device)
        # Copy of the stored state, so that no step waits for the device to read it; None: not read yet.
        self._known: tuple[float, int] | None = None
        self.reset()

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the live tensor [2]: the scale, and the number of updates since its last change."""
        return {"scale": self._stored}

    def values(self) -> Values:
        """Return an empty mapping, because the whole state is a tensor."""
        return {}

    def load_values(self, values: Values) -> None:
        """Discard the copy, so that the tensor is read again when it is needed; it may not be loaded yet."""
        self._known = None

    def reset(self) -> None:
        """Reset to the initial scale."""
        self._store(_FIRST, 0)

    @property
    def value(self) -> float:
        """The factor for the loss of the next step."""
        return self._read()[0]

    @property
    def can_fall(self) -> bool:
        """Whether the scale can be lowered if gradients overflow."""
        return self.value > _SMALLEST

    def follow(self, skipped: str | None) -> None:
        """Update the scale after a finished step. ``skipped``: one of causes.SKIPS, or None for an update.

        A step that was skipped for another reason than ``overflow`` does not change the scale.
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
        # Write in place, which does not wait for an accelerator.
        for index, number in enumerate(self._known):
            self._stored[index] = number


def build_loss_scale(precision: str, device: torch.device) -> LossScale | None:
    """Return the loss scale for training in ``precision``; None if it does not use fp16."""
    return LossScale(device) if precision == "fp16-autocast" else None
