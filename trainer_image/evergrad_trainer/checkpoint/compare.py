"""Compares the states of two runs at one step, tensor by tensor and bit by bit."""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.weights import (
    StoredTensors,
    hold_checkpoint,
    open_tensors,
)


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that two states do not have alike.

    ``largest``: largest absolute difference of its values; None where they cannot be subtracted.
    """

    name: str
    what: str
    largest: float | None = None


@dataclass(frozen=True)
class StateComparison:
    """The states of two runs at ``step``."""

    step: int
    num_tensors: int
    differences: tuple[TensorDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every tensor has the same bits in both."""
        return not self.differences


def compare_states(a: Path, b: Path, *, step: int | None = None) -> StateComparison:
    """Compare weights, moments of the optimizer and all other tensors of two runs.

    ``step``: default the newest of ``a``. One tensor of each is in memory at a time. Raises CheckpointError
    where a run has no checkpoint of that step that validates.
    """
    with contextlib.ExitStack() as leases:
        first = leases.enter_context(hold_checkpoint(a, step=step))
        version = parse_checkpoint_name(first.name)
        found = step if version is None else version.step
        second = leases.enter_context(hold_checkpoint(b, step=found))
        pair = [open_tensors(one, checksums=False) for one in (first, second)]
        names = sorted({*pair[0].table, *pair[1].table})
        differences = _compare(pair, names)
    return StateComparison(found or 0, len(names), tuple(differences))


def _compare(pair: Sequence[StoredTensors], names: Sequence[str]) -> list[TensorDifference]:
    """The tensors of ``names`` that two checkpoints do not have alike. Raises CheckpointError."""
    differences = []
    for name in names:
        one, other = (tensors.table.get(name) for tensors in pair)
        if one is None or other is None:
            only = f"only in {'A' if other is None else 'B'}"
            differences.append(TensorDifference(name, only))
            continue
        forms = [f"{tuple(it.shape)} {str(it.dtype)[6:]}" for it in (one, other)]
        if forms[0] != forms[1]:
            differences.append(TensorDifference(name, f"{forms[0]} in A, {forms[1]} in B"))
            continue

        # By their bytes: equal numbers of other bits (a zero's sign) are no equal states.
        left, right = (tensors.read(name) for tensors in pair)
        if torch.equal(*(it.reshape(-1).view(torch.uint8) for it in (left, right))):
            continue
        distances = (left.double() - right.double()).abs()
        count, largest = int((left != right).sum()), float(distances.max())
        differences.append(
            TensorDifference(
                name,
                f"{count:,} of {left.numel():,} values differ",
                largest if math.isfinite(largest) else None,
            )
        )
    return differences
