"""Parts of a step: its numbers, its parts, its result, and the sign of life that goes with it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.batch import Stage
from evergrad_trainer.data.prefetch import Prefetcher
from evergrad_trainer.data.stream import TrainingStream
from evergrad_trainer.models.gradients import GradientSum
from evergrad_trainer.optim.loss_scale import LossScale
from evergrad_trainer.optim.schedule import LearningRate
from evergrad_trainer.task import Loss, Tensors
from evergrad_trainer.training.buffers import BufferWatch
from evergrad_trainer.training.phase_clock import HostClock, PhaseClock

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
    loss_scale: LossScale | None = None
    """Loss scale of products in fp16."""
    clock: PhaseClock = field(default_factory=HostClock)
    buffers: BufferWatch = field(default_factory=BufferWatch)
    """Refuses modules whose buffers a forward pass changes; by default none has any."""


@dataclass(frozen=True)
class StepOutcome:
    """Result of a step, the same on every rank. ``flags[i]``: some rank raised flag i before the step.

    ``metrics``: the means of the loss's parts. ``seconds``: by phase, see :class:`PhaseClock`. ``skipped``:
    one of causes.SKIPS where the step made no update, and ``problems`` says why in words. ``loss_scale``:
    what the loss was multiplied by, where there is a scale.
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
    loss_scale: float | None = None

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


class NoHeartbeat:
    """Signs of life that are discarded."""

    def beat(self, step: int, slot: int) -> None: ...

    def rest(self) -> None: ...
