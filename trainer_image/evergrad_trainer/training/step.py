"""One optimizer step: this rank's micro-batches → loss → backward → sums over ranks → check → update."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer import torch_private
from evergrad_trainer.data.batch import Batch, Stage
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.distributed import drain
from evergrad_trainer.errors import NonFiniteError, PeerLostError
from evergrad_trainer.models.gradients import GradientSum
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.optim.adamw import set_learning_rate
from evergrad_trainer.optim.schedule import LearningRate, value_at
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training.exchange import Sums
from evergrad_trainer.training.refusal import refuse
from evergrad_trainer.world import World

LossOf = Callable[[Tensors, Stage], Loss]
"""The sums of one micro-batch, whose tensors are on the device."""


@dataclass(frozen=True)
class StepSettings:
    """Numbers of a step, the same in every step and world.

    ``nominal_weight``: what a step would weigh if every position of its samples counted, the divisor before
    the weight is known. ``metrics``: the names of a loss's parts.
    """

    seed: int
    slots_per_step: int
    nominal_weight: int
    clip_norm: float
    is_sharded: bool
    metrics: Sequence[str] = ()
    clip_norms: tuple[tuple[int, float], ...] = ()
    """First step and value of each override of ``clip_norm``."""


@dataclass(frozen=True)
class StepParts:
    """The components one step uses. ``model``: all that is trained."""

    model: nn.Module
    loss_of: LossOf
    optimizer: torch.optim.Optimizer
    gradients: GradientSum
    stream: TrainingStream
    prefetcher: Prefetcher
    schedule: LearningRate
    autocast: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step, the same on every rank. ``flags[i]``: some rank raised flag i before the step.

    ``metrics``: the means of the loss's parts. ``skipped``: one of causes.SKIPS where the step made no
    update, and ``problems`` says why in words.
    """

    step: int
    loss: float
    metrics: dict[str, float]
    weight: int
    sample_hash: str
    learning_rate: float
    grad_norm: float
    flags: tuple[bool, ...]
    seconds: dict[str, float]
    rank_skew_seconds: float
    skipped: str | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def is_non_finite(self) -> bool:
        """Whether a loss or the gradient norm was not finite."""
        return self.skipped in ("loss", "grad")


class StepHeartbeat(Protocol):
    """Sign of life that says where a step is, and survives the process."""

    def beat(self, step: int, slot: int) -> None:
        """``slot`` of ``step`` is about to be computed."""

    def rest(self) -> None:
        """This rank's own work is done; what follows are waits for others."""


class Stepper:
    """Runs steps.

    Holds nothing of a world: rank, size and group are read from the argument, each step anew.
    """

    def __init__(self, parts: StepParts, settings: StepSettings) -> None:
        self._parts = parts
        self._settings = settings
        self.heartbeat: StepHeartbeat = _NoHeartbeat()

    def run(
        self, step: int, world: World, flags: tuple[bool, ...], *, is_skipped: bool = False
    ) -> StepOutcome:
        """Train step ``step`` (from 1); with ``is_skipped`` compute nothing and exchange the flags alone.

        A step whose loss or gradient is not finite makes no update and says so, on all ranks together. Raises
        PeerLostError where the group ended; nothing was updated then. No collective comes after
        :meth:`World.confirm`: a rank that is through it finishes the step, whatever becomes of others.
        """
        parts, settings, clock = self._parts, self._settings, _Clock()
        sums = Sums(
            step, world, flags, num_slots=settings.slots_per_step, names=settings.metrics
        )

        # This rank's own work. The sums of the gradients begin under its last backward pass (collectives, not
        # waited for here); sharded parameters are gathered under every pass (collectives of FSDP2).
        if not is_skipped:
            self._compute(step, world, sums, clock)
            # Launched is not run: until the device is done, this worker is busy, and peers do not wait yet.
            drain(world.device)
            clock.mark("forward_backward")
        self.heartbeat.rest()

        # Collective: flags, weights, hashes, losses and step numbers of all ranks, one small vector. Whoever
        # waits here waits for the slowest rank.
        totals = sums.exchange(busy_seconds=clock.last - clock.begun)

        norm = math.nan
        skipped: str | None = "requested"
        problems: tuple[Problem, ...] = ()
        if not is_skipped:
            # Collective: the rest of the gradients' sums, finished also where a loss is not finite, since all
            # ranks have begun them alike.
            norm, overflow = self._sum_gradients(totals.weight)
            # Collective, the last one: rank 0's norm on every rank; the sums have arrived whole everywhere.
            norm = world.confirm(norm)
            describe = functools.partial(self._describe_samples, step)
            skipped, problems = refuse(step, totals, norm, overflow, describe_samples=describe)
        clock.mark("communication")

        # From here on nobody waits for anybody: the update is made on all ranks or on none.
        learning_rate = parts.schedule(step)
        if skipped is None:
            self._update(step, totals.weight, norm, learning_rate)
        clock.mark("optimizer")
        has_loss = skipped in (None, "grad")
        return StepOutcome(
            step=step,
            loss=totals.mean_loss() if has_loss else math.nan,
            metrics=totals.metrics() if has_loss else {},
            weight=totals.weight,
            sample_hash=f"{totals.sample_hash:016x}",
            learning_rate=learning_rate,
            grad_norm=norm,
            flags=totals.flags,
            seconds=clock.phases,
            rank_skew_seconds=totals.rank_skew_seconds,
            skipped=skipped,
            problems=problems,
        )

    def warm_up(self, world: World) -> None:
        """Compile and allocate what the first step would, and change nothing: one slot, whose gradients are
        thrown away."""
        parts = self._parts
        parts.gradients.begin(world)
        self._forward_backward(
            1, 0, parts.prefetcher.take(1, 0), device=world.device, scale=0.0, is_last=False
        )
        parts.gradients.forget()

    def forget_buffers(self) -> None:
        """Let go of the gradients' buffers: see :meth:`GradientSum.forget`."""
        self._parts.gradients.forget()

    def _compute(self, step: int, world: World, sums: Sums, clock: "_Clock") -> None:
        """This rank's slots of the step, forward and backward."""
        parts = self._parts
        parts.gradients.begin(world)
        for slot, is_real, is_last in self._slots_of(world):
            # A slot of a large model takes seconds: nobody waits for it where the group has ended.
            world.raise_if_given_up()
            self.heartbeat.beat(step, slot)
            # What this rank most probably takes next is read while it computes; a change of the world makes
            # the guess wrong, and nothing else.
            following = slot + world.size
            is_here = following < self._settings.slots_per_step
            upcoming = (step, following) if is_here else (step + 1, world.rank)
            batch = parts.prefetcher.take(step, slot, upcoming=[upcoming])
            clock.mark("data")
            try:
                loss = self._forward_backward(
                    step,
                    slot,
                    batch,
                    device=world.device,
                    scale=float(is_real),
                    is_last=is_last,
                )
            except Exception as error:
                if not isinstance(error, PeerLostError):
                    samples = self._describe_samples(step, slot)
                    error.add_note(f"in step {step}, slot {slot}; its samples are {samples}")
                raise
            if is_real:
                sums.add(slot, batch, loss)
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
            yield (
                (own[index] if is_real else own[0] if own else 0),
                is_real,
                index == rounds - 1,
            )

    def _forward_backward(
        self,
        step: int,
        slot: int,
        batch: Batch,
        *,
        device: torch.device,
        scale: float,
        is_last: bool,
    ) -> Loss:
        parts = self._parts
        # Randomness belongs to the slot, not to the rank that computes it.
        seed_generators(self._settings.seed, step, slot, Purpose.FORWARD)
        tensors = {
            name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()
        }
        parts.gradients.before_backward(is_last=is_last)
        with parts.autocast():
            loss = parts.loss_of(tensors, parts.stream.stage(step))
        # Divided here, not after the sum, so that gradients of big batches stay in the range of their type.
        (loss.total * (scale / self._settings.nominal_weight)).backward()
        parts.gradients.after_backward()
        return loss

    def _sum_gradients(self, weight: int) -> tuple[float, Problem | None]:
        """Finish the sums over ranks.

        Returns the norm of the mean gradient, and what kept the sums from being made.
        """
        try:
            self._parts.gradients.finish()
        except NonFiniteError as error:
            return math.nan, error.problem
        norm = nn.utils.get_total_norm(self._gradients())
        # Collective where gradients are sharded: the parts' norms become one.
        whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        return whole * self._ratio(weight), None

    def _update(self, step: int, weight: int, norm: float, learning_rate: float) -> None:
        """Make the gradients those of the mean over the weight, no longer than the limit, and follow them."""
        clip = value_at(step, self._settings.clip_norm, self._settings.clip_norms)
        factor = self._ratio(weight) * (clip / (norm + 1e-6) if clip and norm > clip else 1.0)
        # One pass over all gradients for both, and none where there is nothing to scale.
        if factor != 1.0:
            torch_private.scale(self._gradients(), factor)
        set_learning_rate(self._parts.optimizer, learning_rate)
        self._parts.optimizer.step()

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parts.model.parameters() if p.grad is not None]

    def _ratio(self, weight: int) -> float:
        return self._settings.nominal_weight / max(1, weight)

    def _describe_samples(self, step: int, slot: int) -> str:
        stream = self._parts.stream
        return ", ".join(stream.describe(sample) for sample in stream.slot(step, slot).samples)


@dataclass
class _Clock:
    """Wall seconds by phase; every moment between creation and ``last`` belongs to one."""

    phases: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(
            ("data", "forward_backward", "communication", "optimizer"), 0.0
        )
    )
    begun: float = field(default_factory=time.perf_counter)
    last: float = field(default_factory=time.perf_counter)

    def mark(self, phase: str) -> None:
        """What has passed since the last mark was ``phase``."""
        now = time.perf_counter()
        self.phases[phase] += now - self.last
        self.last = now


class _NoHeartbeat:
    def beat(self, step: int, slot: int) -> None: ...

    def rest(self) -> None: ...
