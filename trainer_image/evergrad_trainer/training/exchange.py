"""The exchange between ranks, once per step: one vector of 64-bit integers that is summed over all ranks."""

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
"""Positions of a rank's requests and warnings in the vector. Observers request stop, save and evaluate; the
last flag reports that an observer of the task was switched off on this rank, perhaps not on others."""
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class Totals:
    """Values that are the same on every rank after the exchange.

    ``losses``: sum of the loss of each slot. ``parts``: the same for each part of the loss, in slot order.
    ``flags[i]``: whether any rank raised flag i before the step. ``norm``: norm of the summed gradients,
    computed by rank 0; NaN if nothing was computed, or if the norm of any rank is not finite.
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
        """Return the outcome of the step.

        Means are per unit of weight, and NaN if the total weight is 0.
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

    Each loss, and the norm, is sent as the bits of a float64. Exactly one rank fills each position and the
    others send 0, so that the integer sum is the value itself. Every rank adds the losses in slot order, so
    that the total has the same bits in every world.
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
        """``names``: parts of the loss, in the order in which they are sent. ``without``: parts that this
        step does not have. These parts keep their positions in the vector, so that ranks at steps of
        different stages detect the difference instead of waiting for a vector of another length."""
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
        """Add a micro-batch. Nothing is read from the device yet."""
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

        ``norm``: norm of the gradients that all ranks have summed, still on the device; None if nothing was
        computed. ``busy_seconds``: time that this rank worked before it waited for others. Raises
        DivergedError on all ranks if any rank is at another step. Raises PeerLostError.
        """
        size = self._world.size
        rank = self._world.rank
        own_norm, values = self._read_device(norm)

        # Each rank has its own position in the rows of times and steps.
        busy = torch.zeros(size, dtype=torch.int64)
        busy[rank] = int(busy_seconds * _MICROSECONDS)
        steps = torch.zeros(size, dtype=torch.int64)
        steps[rank] = self._step

        # Only rank 0 fills the position of the norm. With different numbers of threads, replicas compute
        # norms that differ in the last bits, and would drift apart if each replica clipped by its own norm.
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

        # Collective: every rank fills its own positions of the same vector.
        vector = self._world.sum_integers(torch.cat(mine))

        sizes = [len(part) for part in mine]
        head, norm_bits, loss_bits, busy, steps = vector.split(sizes)
        # Check this first: if ranks are at different steps, the other values mean nothing.
        compare_steps(steps.tolist())

        *flags, weight, sample_hash, num_spoiled = head.tolist()
        sums = _floats(loss_bits).view_as(values)
        losses, *parts = sums.tolist()
        named = zip(self._names, parts, strict=True)
        common_norm = float(_floats(norm_bits))
        if num_spoiled and math.isfinite(common_norm):
            # The norm of rank 0 is finite, but the norm of another rank is not.
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
        """Return the norm, and rows with one value per slot: one row for the loss, and one for each part.

        This is the step's only transfer from the device. It waits for the device, unless the step already
        has.
        """
        num_rows = 1 + len(self._names)
        values = torch.zeros(num_rows, self._num_slots, dtype=torch.float64)
        if norm is None:
            # Nothing was computed, because the step is skipped.
            return math.nan, values
        own_norm = norm.detach().double().reshape(1)
        read = torch.cat([own_norm, *self._values]).cpu()
        if self._slots:
            own_values = read[1:].view(len(self._slots), num_rows)
            values[:, self._slots] = own_values.T
        return float(read[0]), values


def as_signed(value: int) -> int:
    """Return the int64 that has the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def _bits(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of float64 values as a row of integers."""
    return values.flatten().view(torch.int64)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """Return the float64 values of these bits, in new memory."""
    return bits.clone().view(torch.float64)


def _mean(sums: Sequence[float], weight: int) -> float:
    if not weight:
        return math.nan
    return math.fsum(sums) / weight
