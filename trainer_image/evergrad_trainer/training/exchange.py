"""Exchange between ranks once a step: one vector of 64-bit integers that is summed over all of them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.batch import Batch
from evergrad_trainer.distributed.world import World
from evergrad_trainer.state.replicas import compare_steps
from evergrad_trainer.task import Loss
from evergrad_trainer.training.step_parts import StepOutcome

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
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Totals:
    """Facts that every rank has after the exchange.

    ``losses`` are the sums of the slots, ``parts`` those of each part, in slot order.
    ``flags[i]``: some rank raised flag i before the step. ``norm``: that of the summed gradients on rank 0;
    not a number where there is none, or where any rank's is not finite.
    """

    flags: tuple[bool, ...]
    weight: int
    sample_hash: int
    losses: Sequence[float]
    parts: Mapping[str, Sequence[float]]
    norm: float
    rank_skew_seconds: float

    def outcome(
        self,
        step: int,
        *,
        skipped: str | None,
        problems: tuple[Problem, ...],
        learning_rate: float,
        grad_norm: float,
        seconds: dict[str, float],
    ) -> StepOutcome:
        """Return what the step says of itself.

        Means are a unit of weight, and not a number where nothing has weight.
        """
        has_loss = skipped in (None, "grad", "overflow")
        metrics = {name: _mean(sums, self.weight) for name, sums in self.parts.items()}
        return StepOutcome(
            step=step,
            loss=_mean(self.losses, self.weight) if has_loss else math.nan,
            metrics=metrics if has_loss else {},
            weight=self.weight,
            sample_hash=f"{self.sample_hash:016x}",
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            flags=self.flags,
            seconds=seconds,
            rank_skew_seconds=self.rank_skew_seconds,
            skipped=skipped,
            problems=problems,
        )


class Sums:
    """Adds up one rank's micro-batches, and exchanges the sums with the other ranks.

    Losses and the norm travel as the bits of a float64, one place each: only one rank fills a place, so that
    the sum is the value itself. All ranks add the losses up in slot order, which gives the same bits in every
    world.
    """

    def __init__(
        self,
        step: int,
        world: World,
        flags: Sequence[bool],
        *,
        num_slots: int,
        names: Sequence[str] = (),
        without: Collection[str] = (),
    ) -> None:
        """``names``: those of the loss's parts, in the order in which they travel. ``without``: those that
        this step does not have. They have their places all the same: ranks at steps of different stages must
        find that out, and not wait for a vector of another length."""
        self._step = step
        self._world = world
        self._flags = tuple(flags)
        self._names = tuple(names)
        self._without = frozenset(without)
        self._num_slots = num_slots
        self._slots: list[int] = []
        self._values: list[torch.Tensor] = []
        self._weight = 0
        self._hash = 0

    def add(self, slot: int, batch: Batch, loss: Loss) -> None:
        """Count a micro-batch. Nothing is read from the device yet."""
        nothing = loss.total.new_zeros(())
        parts = [
            nothing if name in self._without else loss.parts[name] for name in self._names
        ]
        values = [value.detach().double() for value in (loss.total, *parts)]
        self._slots.append(slot)
        self._values.append(torch.stack(values))
        self._weight += batch.weight
        self._hash += batch.hash

    def exchange(self, norm: torch.Tensor | None, busy_seconds: float) -> Totals:
        """Sum over all ranks.

        ``norm``: of the gradients that all ranks have summed, still on the device; None without one.
        ``busy_seconds``: this rank's own time before it waited for others. Raises DivergedError, on all
        ranks, where one is at another step; PeerLostError.
        """
        size = self._world.size
        rank = self._world.rank
        own_norm, values = self._read_device(norm)

        # Each rank has its own place in the rows of times and steps.
        busy = torch.zeros(size, dtype=torch.int64)
        busy[rank] = int(busy_seconds * _MICROSECONDS)
        steps = torch.zeros(size, dtype=torch.int64)
        steps[rank] = self._step

        # Rank 0 alone fills the place of the norm. Replicas that compute it on other numbers of threads
        # differ in its last bits, and would drift apart if each clipped by its own.
        norm_sent = own_norm if rank == 0 else 0.0
        norm_bits = _bits(torch.tensor([norm_sent], dtype=torch.float64))
        is_spoiled = not math.isfinite(own_norm)
        counts = [
            *map(int, self._flags),
            self._weight,
            as_signed(self._hash),
            int(is_spoiled),
        ]
        head = torch.tensor(counts, dtype=torch.int64)
        mine = [head, norm_bits, _bits(values), busy, steps]

        # Collective: every rank fills its own places of the same vector.
        vector = self._world.sum_integers(torch.cat(mine))

        sizes = [len(part) for part in mine]
        head, norm_bits, loss_bits, busy, steps = vector.split(sizes)
        # First: nothing of the rest means anything where ranks are at different steps.
        compare_steps(steps.tolist())

        *flags, weight, sample_hash, num_spoiled = head.tolist()
        sums = _floats(loss_bits).view_as(values)
        losses, *parts = sums.tolist()
        named = zip(self._names, parts, strict=True)
        common_norm = float(_floats(norm_bits))
        if num_spoiled and math.isfinite(common_norm):
            # Rank 0's is fine, and another's is not.
            common_norm = math.nan
        times = busy.double() / _MICROSECONDS
        skew = times.max() - times.median()
        return Totals(
            flags=tuple(bool(count) for count in flags),
            weight=int(weight),
            sample_hash=int(sample_hash) % 2**64,
            losses=losses,
            parts={name: part for name, part in named if name not in self._without},
            norm=common_norm,
            rank_skew_seconds=float(skew),
        )

    def _read_device(self, norm: torch.Tensor | None) -> tuple[float, torch.Tensor]:
        """The norm, and a row of slots for the loss and each of its parts.

        One transfer from the device for the whole step; where the step has not waited for it, this does.
        """
        num_rows = 1 + len(self._names)
        values = torch.zeros(num_rows, self._num_slots, dtype=torch.float64)
        if norm is None:
            # Nothing was computed: the step is passed over.
            return math.nan, values
        own_norm = norm.detach().double().reshape(1)
        read = torch.cat([own_norm, *self._values]).cpu()
        if self._slots:
            own_values = read[1:].view(len(self._slots), num_rows)
            values[:, self._slots] = own_values.T
        return float(read[0]), values


def as_signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def _bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of float64 values, as a row of integers."""
    return values.flatten().view(torch.int64)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """The float64 values of these bits, in memory of their own."""
    return bits.clone().view(torch.float64)


def _mean(sums: Sequence[float], weight: int) -> float:
    if not weight:
        return math.nan
    return math.fsum(sums) / weight
