"""Detects trained modules whose buffers change in a forward pass, such as the statistics of a BatchNorm: the
workers would have different buffers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.recipes.user_task import Code
from evergrad_trainer.state.providers import module_buffers

_MOST_NAMED: Final = 4


class BufferWatch:
    """Refuses trained modules whose saved buffers change in a forward pass, unless only one worker trains.

    A single worker needs no check: it changes the buffers in the same way each time it trains the same
    samples.
    """

    def __init__(
        self,
        trained: Mapping[str, nn.Module] | None = None,
        code: Code | None = None,
        *,
        may_share: bool = False,
    ) -> None:
        """``trained``: modules by name. ``code``: the task that they come from. ``may_share``: several
        workers may train together, now or later."""
        self._trained = trained or {}
        self._code = code or Code(None)
        self._may_share = may_share
        self._seen: list[Stage] = []

    @contextmanager
    def watching(self, stage: Stage, *, num_workers: int) -> Iterator[None]:
        """Use as a context around the forward pass of a micro-batch.

        Checks only the first micro-batch of each stage, because each stage computes its own loss. Raises
        TaskInputError or TaskError if the pass changes buffers.
        """
        is_shared = self._may_share or num_workers > 1
        if not is_shared or any(one is stage for one in self._seen):
            yield
            return
        self._seen.append(stage)
        before = self._copy()
        yield
        if changed := self._find_changed(before):
            raise self._code.explain(_describe(changed))

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Use as a context around a forward pass that is not part of the training: it restores the
        buffers."""
        before = self._copy()
        yield
        now = self._buffers()
        with torch.no_grad():
            for name in self._find_changed(before):
                now[name].copy_(before[name])

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: one.clone() for name, one in self._buffers().items()}

    def _find_changed(self, before: Mapping[str, torch.Tensor]) -> list[str]:
        now = self._buffers()
        return [name for name, value in before.items() if not _is_same(now[name], value)]

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}.{own}": tensor
            for name, module in self._trained.items()
            for own, tensor in module_buffers(module).items()
        }


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same values; NaN counts as equal to NaN, unlike in a plain comparison."""
    if one.is_floating_point() and one.shape == other.shape:
        return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return torch.equal(one, other)


def _describe(changed: Sequence[str]) -> Problem:
    named = ", ".join(changed[:_MOST_NAMED])
    if len(changed) > _MOST_NAMED:
        named += f" and {len(changed) - _MOST_NAMED} more"
    return Problem(
        "spec.training.recipe",
        f"the forward pass changes {named}",
        "each worker computes other samples, so that its buffers would differ from those of the others",
        "Use a layer that keeps no statistics (LayerNorm, GroupNorm, or track_running_stats=False), or train "
        "with one worker on one node",
    )
