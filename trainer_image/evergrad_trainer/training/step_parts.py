"""The settings, components and outcome of a step, and its heartbeat."""

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
"""Computes the sums of one micro-batch, whose tensors are on the device."""


@dataclass(frozen=True)
class StepSettings:
    """Settings that are the same in every step and world.

    ``nominal_weight``: weight of a step if every position of its samples counts. It is the divisor until the
    actual weight is known. ``metrics``: names of the parts of a loss.
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
    """The components that a step uses. ``model``: one module that contains all trained modules."""

    model: nn.Module
    loss_of: LossOf
    optimizer: torch.optim.Optimizer
    gradients: GradientSum
    stream: TrainingStream
    prefetcher: Prefetcher
    schedule: LearningRate
    autocast: Callable[[], AbstractContextManager[object]]
    loss_scale: LossScale | None = None
    """Loss scale of fp16 products; None without one."""
    clock: PhaseClock = field(default_factory=HostClock)
    buffers: BufferWatch = field(default_factory=BufferWatch)
    """Refuses modules whose buffers change in a forward pass; by default it watches no modules."""


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, the same on every rank.

    ``flags[i]``: whether any rank raised flag i before the step. ``metrics``: means of the parts of the loss.
    ``seconds``: by phase, see :class:`PhaseClock`. ``skipped``: one of causes.SKIPS if the step made no
    update; ``problems`` then gives the reasons. ``loss_scale``: factor of the loss; None without a loss
    scale.
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
        """Return whether a loss or the gradient norm was not finite."""
        return self.skipped in ("loss", "grad")


class StepHeartbeat(Protocol):
    """A heartbeat that records the current slot of a step, and survives the process."""

    def beat(self, step: int, slot: int) -> None:
        """Record that ``slot`` of ``step`` is computed next."""

    def rest(self) -> None:
        """Record that this rank's own work is done, so that it only waits for other ranks."""


class NoHeartbeat:
    """A heartbeat that records nothing."""

    def beat(self, step: int, slot: int) -> None: ...

    def rest(self) -> None: ...
