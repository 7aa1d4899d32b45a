"""Exchange between ranks once a step: one vector of 64-bit integers that is summed over all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from evergrad_trainer.data.batch import Batch
from evergrad_trainer.state.replicas import compare_steps
from evergrad_trainer.task import Loss
from evergrad_trainer.world import World

NUM_FLAGS = 8
(
    FLAG_SIGNAL,
    FLAG_STOP_FILE,
    FLAG_FENCED,
    FLAG_CHANGE,
    FLAG_STOP,
    FLAG_SAVE,
    FLAG_EVALUATE,
    FLAG_OBSERVER_OFF,
) = range(NUM_FLAGS)
"""Places of a rank's wishes and warnings in the vector. Stop, save and evaluate are what observers ask for;
the last says that a task's observer was switched off here, and perhaps not elsewhere."""


@dataclass(frozen=True)
class Totals:
    """What every rank knows after the exchange.

    ``losses`` are the sums of the slots, ``parts`` those of each part, in slot order.
    ``flags[i]``: some rank raised flag i before the step.
    """

    flags: tuple[bool, ...]
    weight: int
    sample_hash: int
    losses: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    rank_skew_seconds: float

    def mean_loss(self) -> float:
        """The loss a unit of weight; not a number where nothing has weight."""
        return _mean(self.losses, self.weight)

    def metrics(self) -> dict[str, float]:
        """The mean of each part."""
        return {name: _mean(sums, self.weight) for name, sums in self.parts.items()}


class Sums:
    """Adds up one rank's micro-batches, and exchanges the sums with the other ranks.

    Losses travel as the bits of a float64, one place a slot: only one rank fills a place, so the sum is the
    loss itself, and all ranks add them up in slot order, which gives the same bits in every world.
    """

    def __init__(
        self,
        step: int,
        world: World,
        flags: Sequence[bool],
        *,
        num_slots: int,
        names: Sequence[str] = (),
    ) -> None:
        """``names``: those of the loss's parts, in the order in which they travel."""
        self._step = step
        self._world = world
        self._flags = tuple(flags)
        self._names = tuple(names)
        self._num_slots = num_slots
        self._slots: list[int] = []
        self._values: list[torch.Tensor] = []
        self._weight = 0
        self._hash = 0

    def add(self, slot: int, batch: Batch, loss: Loss) -> None:
        """Count a micro-batch. Nothing is read from the device yet."""
        self._slots.append(slot)
        values = (loss.total, *(loss.parts[name] for name in self._names))
        self._values.append(torch.stack([value.detach().double() for value in values]))
        self._weight += batch.weight
        self._hash += batch.hash

    def exchange(self, busy_seconds: float) -> Totals:
        """Sum over all ranks. ``busy_seconds``: this rank's own time before it waited for others.

        Raises DivergedError, on all ranks, where one is at another step; PeerLostError.
        """
        size, rank = self._world.size, self._world.rank
        values = torch.zeros(1 + len(self._names), self._num_slots, dtype=torch.float64)
        if self._slots:
            # One transfer from the device for the whole step.
            values[:, self._slots] = torch.stack(self._values, dim=1).cpu()
        head = torch.tensor(
            [*map(int, self._flags), self._weight, as_signed(self._hash)], dtype=torch.int64
        )
        busy = torch.zeros(size, dtype=torch.int64)
        busy[rank] = int(busy_seconds * 1e6)
        steps = torch.zeros(size, dtype=torch.int64)
        steps[rank] = self._step

        # Collective: every rank fills its own places of the same vector.
        mine = [head, values.flatten().view(torch.int64), busy, steps]
        vector = self._world.sum_integers(torch.cat(mine))
        head, bits, busy, steps = vector.split([len(part) for part in mine])

        compare_steps(steps.tolist())
        times = busy.double() / 1e6
        losses, *parts = bits.clone().view(torch.float64).view_as(values).tolist()
        *flags, weight, sample_hash = head.tolist()
        return Totals(
            flags=tuple(bool(count) for count in flags),
            weight=int(weight),
            sample_hash=int(sample_hash) % 2**64,
            losses=losses,
            parts=dict(zip(self._names, parts, strict=True)),
            rank_skew_seconds=float(times.max() - times.median()),
        )


def as_signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def _mean(sums: Sequence[float], weight: int) -> float:
    return math.fsum(sums) / weight if weight else math.nan
