"""One optimizer step: this rank's slots → objective → backward → sum over ranks → check → update."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer import torch_private
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.stream import SlotBatch, TrainingStream
from evergrad_trainer.distributed import drain
from evergrad_trainer.errors import NonFiniteError, PeerLostError
from evergrad_trainer.models.gradients import GradientSum
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.objectives.causal_lm import LossSum
from evergrad_trainer.optim.adamw import set_learning_rate
from evergrad_trainer.optim.schedule import LearningRate
from evergrad_trainer.state.replicas import compare_steps
from evergrad_trainer.world import World

NUM_FLAGS = 4
FLAG_SIGNAL, FLAG_STOP_FILE, FLAG_FENCED, FLAG_CHANGE = range(NUM_FLAGS)


@dataclass(frozen=True)
class StepSettings:
    """What a step needs to know besides its parts. ``nominal_tokens``: G · S, the divisor before the valid tokens are counted."""

    seed: int
    slots_per_step: int
    nominal_tokens: int
    clip_norm: float
    is_sharded: bool


@dataclass(frozen=True)
class StepOutcome:
    """What every rank knows after a step. ``flags[i]``: some rank raised flag i before the step.

    ``skipped``: one of SKIP_REASONS where the step made no update, and ``problems`` says why in words.
    """

    step: int
    loss: float
    valid_tokens: int
    sample_hash: str
    learning_rate: float
    grad_norm: float
    flags: tuple[bool, ...]
    seconds: dict[str, float]
    rank_skew_seconds: float
    skipped: str | None = None
    problems: tuple[Problem, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What the recipe measures besides, by name."""

    @property
    def is_non_finite(self) -> bool:
        """Whether a loss or the gradient norm was not finite."""
        return self.skipped in ("loss", "grad")


@dataclass
class _Clock:
    """Wall seconds by phase; every moment between creation and ``total`` belongs to one."""

    phases: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("data", "forward_backward", "communication", "optimizer"), 0.0)
    )
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def mark(self, phase: str) -> None:
        """What has passed since the last mark was ``phase``."""
        now = time.perf_counter()
        self.phases[phase] += now - self.last
        self.last = now


class _Tally:
    """What the ranks tell each other once a step, as one vector of 64-bit integers that is summed over ranks.

    Losses travel as the bits of a float64, one place a slot: only one rank fills a place, so the sum is the loss itself, and all
    ranks add them up in slot order, which gives the same bits in every world.
    """

    def __init__(self, step: int, num_slots: int, world: World, flags: tuple[bool, ...]) -> None:
        self._step = step
        self._num_slots = num_slots
        self._world = world
        self._flags = flags
        self._losses: list[tuple[int, torch.Tensor]] = []
        self._valid_tokens = 0
        self._hash = 0

    def add(self, batch: SlotBatch, loss: torch.Tensor) -> None:
        self._losses.append((batch.slot, loss.detach()))
        self._valid_tokens += batch.valid_tokens
        self._hash += batch.sample_hash

    def exchange(self, busy_seconds: float) -> "_Totals":
        """Sum over all ranks. ``busy_seconds``: this rank's own time before it waited for others.

        Raises DivergedError, on all ranks, where one is at another step.
        """
        losses = torch.zeros(self._num_slots, dtype=torch.float64)
        for slot, loss in self._losses:
            losses[slot] = loss.double().cpu()
        head = [*(int(flag) for flag in self._flags), self._valid_tokens, _signed(self._hash)]
        busy = torch.zeros(self._world.size, dtype=torch.int64)
        busy[self._world.rank] = int(busy_seconds * 1e6)
        steps = torch.zeros(self._world.size, dtype=torch.int64)
        steps[self._world.rank] = self._step
        vector = torch.cat([torch.tensor(head, dtype=torch.int64), losses.view(torch.int64), busy, steps])
        vector = self._world.sum_integers(vector)
        end = len(head) + self._num_slots
        compare_steps(vector[end + self._world.size :].tolist())
        times = vector[end : end + self._world.size].double() / 1e6
        return _Totals(
            flags=tuple(bool(count) for count in vector[:NUM_FLAGS].tolist()),
            valid_tokens=int(vector[NUM_FLAGS]),
            sample_hash=int(vector[NUM_FLAGS + 1]) % 2**64,
            losses=vector[len(head) : end].clone().view(torch.float64).tolist(),
            rank_skew_seconds=float(times.max() - times.median()),
        )


@dataclass(frozen=True)
class _Totals:
    flags: tuple[bool, ...]
    valid_tokens: int
    sample_hash: int
    losses: list[float]
    rank_skew_seconds: float


@dataclass(frozen=True)
class StepParts:
    """The components one step uses."""

    model: nn.Module
    loss_sum: LossSum
    optimizer: torch.optim.Optimizer
    gradients: GradientSum
    stream: TrainingStream
    prefetcher: Prefetcher
    schedule: LearningRate
    autocast: Callable[[], AbstractContextManager[object]]


class Pulse(Protocol):
    """Hears where a step is: a sign of life that survives the process."""

    def beat(self, step: int, slot: int) -> None:
        """``slot`` of ``step`` is about to be computed."""

    def rest(self) -> None:
        """This rank's own work is done; what follows are waits for others."""


class _NoPulse:
    def beat(self, step: int, slot: int) -> None: ...

    def rest(self) -> None: ...


class Stepper:
    """Runs steps. Holds nothing of a world: rank, size and group are read from the argument, each step anew."""

    def __init__(self, parts: StepParts, settings: StepSettings) -> None:
        self._parts = parts
        self._settings = settings
        self.pulse: Pulse = _NoPulse()

    def forget_buffers(self) -> None:
        """Let go of the gradients' buffers: see :meth:`GradientSum.forget`."""
        self._parts.gradients.forget()

    def warm_up(self, world: World) -> None:
        """Compile and allocate what the first step would, and change nothing: one slot, whose gradients are thrown away."""
        parts = self._parts
        batch = parts.stream.slot(1, 0)
        parts.gradients.begin(world)
        self._forward_backward(batch, device=world.device, weight=0.0, is_last=False)
        parts.gradients.forget()

    def run(
        self, step: int, world: World, flags: tuple[bool, ...], *, is_skipped: bool = False
    ) -> StepOutcome:
        """Train step ``step`` (from 1); with ``is_skipped`` compute nothing and exchange the flags alone.

        A step whose loss or gradient is not finite makes no update and says so, on all ranks together. Raises PeerLostError
        where the group ended; nothing was updated then. No collective comes after :meth:`World.confirm`: a rank that is through
        it finishes the step, whatever becomes of others.
        """
        parts, clock = self._parts, _Clock()
        tally = _Tally(step, self._settings.slots_per_step, world, flags)
        if not is_skipped:
            self._compute(step, world, tally, clock)
            # Launched is not run: until its device is done, this worker is busy and not stuck, and its peers do not wait yet.
            drain(world.device)
            clock.mark("forward_backward")
        self.pulse.rest()
        totals = tally.exchange(busy_seconds=clock.last - clock.begun)

        grad_norm = math.nan
        skipped: str | None = "requested"
        problems: tuple[Problem, ...] = ()
        if not is_skipped:
            grad_norm, overflow = self._norm(totals.valid_tokens)
            grad_norm = world.confirm(grad_norm)
            skipped, problems = self._refuse(step, totals, grad_norm, overflow)
        clock.mark("communication")

        learning_rate = parts.schedule(step)
        if skipped is None:
            self._clip(totals.valid_tokens, grad_norm)
            set_learning_rate(parts.optimizer, learning_rate)
            parts.optimizer.step()
        clock.mark("optimizer")
        has_loss = skipped in (None, "grad")
        return StepOutcome(
            step=step,
            loss=math.fsum(totals.losses) / totals.valid_tokens if has_loss else math.nan,
            valid_tokens=totals.valid_tokens,
            sample_hash=f"{totals.sample_hash:016x}",
            learning_rate=learning_rate,
            grad_norm=grad_norm,
            flags=totals.flags,
            seconds=clock.phases,
            rank_skew_seconds=totals.rank_skew_seconds,
            skipped=skipped,
            problems=problems,
        )

    def _compute(self, step: int, world: World, tally: _Tally, clock: _Clock) -> None:
        """This rank's slots of the step, forward and backward."""
        parts = self._parts
        parts.gradients.begin(world)
        for slot, is_real, is_last in self._slots_of(world):
            world.raise_if_given_up()
            self.pulse.beat(step, slot)
            batch = parts.prefetcher.take(step, slot, upcoming=self._upcoming(step, slot, world))
            clock.mark("data")
            try:
                loss = self._forward_backward(
                    batch, device=world.device, weight=float(is_real), is_last=is_last
                )
            except Exception as error:
                if not isinstance(error, PeerLostError):
                    error.add_note(
                        f"in step {step}, slot {slot}; its samples are {self._samples(step, slot)}"
                    )
                raise
            if is_real:
                tally.add(batch, loss)
            clock.mark("forward_backward")

    def _slots_of(self, world: World) -> Iterator[tuple[int, bool, bool]]:
        """(slot, is_real, is_last) of this rank.

        Sharded ranks must all run as often: one that has no slot left repeats its first, at weight 0.
        """
        num_slots = self._settings.slots_per_step
        own = list(range(world.rank, num_slots, world.size))
        rounds = math.ceil(num_slots / world.size) if self._settings.is_sharded else len(own)
        for index in range(rounds):
            is_real = index < len(own)
            # A rank without a slot of its own computes one that does not count: sharded ranks work together.
            yield (own[index] if is_real else own[0] if own else 0), is_real, index == rounds - 1

    def _upcoming(self, step: int, slot: int, world: World) -> list[tuple[int, int]]:
        """The slot this rank most probably takes next."""
        following = slot + world.size
        return [(step, following) if following < self._settings.slots_per_step else (step + 1, world.rank)]

    def _forward_backward(
        self, batch: SlotBatch, *, device: torch.device, weight: float, is_last: bool
    ) -> torch.Tensor:
        seed_generators(self._settings.seed, batch.step, batch.slot, Purpose.FORWARD)
        input_ids = batch.input_ids.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        self._parts.gradients.before_backward(is_last=is_last)
        with self._parts.autocast():
            loss = self._parts.loss_sum(input_ids, labels)
        # Divided here, not after the sum, so that gradients of big batches stay in the range of their type.
        (loss * (weight / self._settings.nominal_tokens)).backward()
        self._parts.gradients.after_backward()
        return loss

    def _norm(self, valid_tokens: int) -> tuple[float, Problem | None]:
        """The norm of the mean gradient over valid tokens, and what kept the sums from being made.

        The sums are finished also where a loss is not finite: some were begun under the backward pass, on all ranks alike.
        """
        try:
            self._parts.gradients.finish()
        except NonFiniteError as error:
            return math.nan, error.problem
        norm = nn.utils.get_total_norm(self._gradients())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm) * self._ratio(
            valid_tokens
        ), None

    def _clip(self, valid_tokens: int, norm: float) -> None:
        """Make the gradients those of the mean over valid tokens, no longer than the limit."""
        clip = self._settings.clip_norm
        factor = self._ratio(valid_tokens) * (clip / (norm + 1e-6) if clip and norm > clip else 1.0)
        if factor != 1.0:
            torch_private.scale(self._gradients(), factor)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parts.model.parameters() if p.grad is not None]

    def _ratio(self, valid_tokens: int) -> float:
        return self._settings.nominal_tokens / max(1, valid_tokens)

    def _refuse(
        self, step: int, totals: _Totals, norm: float, overflow: Problem | None
    ) -> tuple[str | None, tuple[Problem, ...]]:
        """Why the step must not update anything, and in words; all from what every rank knows alike."""
        # Losses first: a loss names its slot and samples, a gradient cannot.
        losses = tuple(
            self._describe(step, slot, loss)
            for slot, loss in enumerate(totals.losses)
            if not math.isfinite(loss)
        )
        if losses:
            return "loss", losses
        if overflow is not None:
            return "grad", (replace(overflow, path=f"step {step}, {overflow.path}"),)
        if not math.isfinite(norm):
            why = "all losses of the step are finite, so the backward pass overflowed"
            remedy = "Nothing was updated. Lower the learning rate or use a wider precision; the state before the step is good"
            return "grad", (Problem(f"step {step}", f"the gradient norm is {norm}", why, remedy),)
        if totals.valid_tokens == 0:
            why = "every label of its samples is masked"
            return "empty", (
                Problem(
                    f"step {step}", "no token carries a loss", why, "Nothing was updated. Look at the data"
                ),
            )
        return None, ()

    def _describe(self, step: int, slot: int, loss: float) -> Problem:
        samples = self._samples(step, slot)
        return Problem(
            f"step {step}, slot {slot}",
            f"the loss is {loss}",
            f"its samples are {samples}",
            "Nothing was updated. Look at these samples, name the step in spec.training.skipSteps, or lower the learning rate",
        )

    def _samples(self, step: int, slot: int) -> str:
        stream = self._parts.stream
        return ", ".join(stream.describe(sample) for sample in stream.slot(step, slot).samples)


def _signed(value: int) -> int:
    """The int64 with the low 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63
