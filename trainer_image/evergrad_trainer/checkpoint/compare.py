"""Compares the states of two runs at one step, bit by bit for each tensor."""

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
    """A tensor that differs between two states.

    ``what`` describes the difference. ``largest`` is the largest absolute difference of the values; None if
    it is not finite or if the tensors cannot be subtracted.
    """

    name: str
    what: str
    largest: float | None = None


@dataclass(frozen=True)
class StateComparison:
    """The result of a comparison of two runs' states at ``step``."""

    step: int
    num_tensors: int
    differences: tuple[TensorDifference, ...]

    @property
    def is_equal(self) -> bool:
        """Whether every tensor has the same bits in both states."""
        return not self.differences


def compare_states(a: Path, b: Path, *, step: int | None = None) -> StateComparison:
    """Compare all tensors of two runs, such as weights and optimizer moments.

    ``step`` defaults to the newest step of ``a``. Only one tensor of each run is in memory at a time. Raises
    CheckpointError if one of the runs has no valid checkpoint of the step.
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
    """Return the differences of the tensors ``names`` of two checkpoints. Raises CheckpointError."""
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

        # Compare bytes, because states are different if equal numbers have different bits (0.0 and -0.0).
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
