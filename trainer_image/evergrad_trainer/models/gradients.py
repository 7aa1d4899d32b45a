"""Sums of a step's gradients over its slots and all ranks.

Plain data parallelism reduces our own flat buckets instead of wrapping the model, so that the group can
change between two steps. ``begin`` → for each slot: ``before_backward``, backward, ``after_backward`` →
``finish`` → a wait for the device → ``problem``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from evergrad_manifest.errors import Problem
from evergrad_trainer.distributed.transports import Pending
from evergrad_trainer.distributed.world import World


class GradientSum(Protocol):
    """Sums gradients over slots and ranks; afterwards each ``parameter.grad`` holds the sum."""

    def begin(self, world: World) -> None:
        """Forget the last step's gradients, and begin a step of ``world``."""

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare for a slot's gradients.

        ``is_last``: this rank's last slot of the step, after which its part of the sum is final.
        """

    def after_backward(self) -> None:
        """Take the slot's gradients, which are all there."""

    def finish(self) -> None:
        """Make ``parameter.grad`` the sum over all slots of all ranks. Raises PeerLostError.

        On an accelerator this is launched and not waited for: see :meth:`World.follow`.
        """

    def problem(self) -> Problem | None:
        """Return what kept the sums from being made, the same on every rank; None if nothing did.

        The sums must be here: see :meth:`World.await_started`.
        """

    def forget(self) -> None:
        """Drop all buffers: a collective that never ended may still write into them."""


class _Bucket:
    """A flat buffer whose slices are the gradients of some parameters."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = tuple(parameters)
        first = parameters[0]
        self.flat = torch.zeros(
            sum(p.numel() for p in parameters), dtype=first.dtype, device=first.device
        )
        sizes = [p.numel() for p in parameters]
        self.views = [
            part.view_as(p)
            for part, p in zip(self.flat.split(sizes), parameters, strict=True)
        ]
        self.missing = 0


def _partition(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int
) -> list[list[torch.nn.Parameter]]:
    """Parameters in reverse order (about that of the backward pass), cut where a bucket is full or the type
    changes."""
    buckets: list[list[torch.nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        item = parameter.numel() * parameter.element_size()
        same = (
            bool(buckets)
            and buckets[-1][0].dtype == parameter.dtype
            and buckets[-1][0].device == parameter.device
        )
        if not same or size + item > bucket_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(parameter)
        size += item
    return buckets


class BucketedSum:
    """Sum over slots in place, then over ranks bucket by bucket, overlapping with the last backward pass."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, bucket_bytes: int
    ) -> None:
        self._parameters = tuple(parameters)
        self._bucket_bytes = bucket_bytes
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[torch.nn.Parameter, _Bucket] = {}
        self._world: World | None = None
        self._works: list[Pending] = []
        self._is_armed = False
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self, world: World) -> None:
        self._world = world
        # Those of a step that was cut short belong to a group that is gone.
        self._works = []
        self._is_armed = False
        if world.group is None:
            # Alone: autograd hands over its own gradients; buckets would only cost memory and a copy.
            self._buckets, self._bucket_of = [], {}
            for parameter in self._parameters:
                parameter.grad = None
            return
        # Made in the first step with others, and kept: parameters do not change.
        if not self._buckets:
            self._buckets = [
                _Bucket(part) for part in _partition(self._parameters, self._bucket_bytes)
            ]
            self._bucket_of = {
                p: bucket for bucket in self._buckets for p in bucket.parameters
            }
        # autograd adds to a gradient that is there already: all slots are summed in the buckets themselves.
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def before_backward(self, *, is_last: bool) -> None:
        # Earlier slots only add: a bucket that was sent before the last one was added would be too small.
        self._is_armed = is_last and bool(self._buckets)

    def after_backward(self) -> None:
        """Nothing to do: autograd has added to the buckets' views."""

    def finish(self) -> None:
        for bucket in self._buckets[len(self._works) :]:
            # A parameter that took no part in the last slot never fired its hook.
            self._reduce(bucket)
        works, self._works = self._works, []
        # Collective: the first buckets were summed under the backward pass, so that little is waited for.
        for work in works:
            self._reducing_world.follow(work)
        _fill_missing(self._parameters)

    def problem(self) -> Problem | None:
        """Nothing: what is not finite shows in the norm."""
        return None

    def forget(self) -> None:
        self._works, self._buckets, self._bucket_of = [], [], {}
        self._is_armed = False
        for parameter in self._parameters:
            parameter.grad = None

    @property
    def _reducing_world(self) -> World:
        assert self._world is not None  # noqa: S101 - ``begin`` comes before everything else
        return self._world

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        if not self._is_armed:
            return
        self._bucket_of[parameter].missing -= 1  # type: ignore[index]
        # Every rank must start the same bucket next, whatever the order its own gradients arrive in.
        while (
            len(self._works) < len(self._buckets)
            and self._buckets[len(self._works)].missing == 0
        ):
            self._reduce(self._buckets[len(self._works)])

    def _reduce(self, bucket: _Bucket) -> None:
        self._works.append(self._reducing_world.start_sum(bucket.flat))


class ExactSum:
    """Sums that do not depend on order: every slot's gradient is rounded to a fixed grid and summed as 64-bit
    integers.

    Integer addition is associative, so worlds of every size give the same bits, at 8 bytes a parameter and
    without overlap. The grid is 2**-44 (5.7e-14); sums up to 2**18 fit. A slot that could leave that range is
    not added but counted, in one place more at the end of each sum, so that all ranks learn of it together.
    """

    GRID_BITS = 44

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        bucket_bytes: int,
        slots_per_step: int,
    ) -> None:
        self._parameters = tuple(parameters)
        self._partition = _partition(self._parameters, bucket_bytes)
        self._sums: list[torch.Tensor] = []
        self._world: World | None = None
        self._scale = math.ldexp(1.0, self.GRID_BITS)
        self._largest = math.ldexp(1.0, 62 - self.GRID_BITS) / slots_per_step

    def begin(self, world: World) -> None:
        self._world = world
        if not self._sums:
            self._sums = [
                torch.zeros(
                    sum(p.numel() for p in part) + 1,
                    dtype=torch.int64,
                    device=part[0].device,
                )
                for part in self._partition
            ]
        for total in self._sums:
            total.zero_()
        # Each slot has gradients of its own, which are rounded before they are added.
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, is_last: bool) -> None:
        """Nothing to prepare: reduction begins when all slots are done."""

    def after_backward(self) -> None:
        for total, part in zip(self._sums, self._partition, strict=True):
            # A parameter that took no part in the slot has none.
            flat = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in part
                ]
            )
            # A comparison that is false for what is not a number, too. It stays on the device: reading it
            # here would make an accelerator wait for the host at every bucket of every slot.
            fits = flat.abs().amax() < self._largest
            whole = torch.where(fits, flat.double(), 0.0)
            total[:-1] += (whole * self._scale).round_().to(torch.int64)
            total[-1] += ~fits
            for parameter in part:
                parameter.grad = None

    def finish(self) -> None:
        # Collective: one bucket is summed while others wait; every rank starts them in the same order.
        if self._world is not None and self._world.group is not None:
            works = [self._world.start_sum(total) for total in self._sums]
            for work in works:
                self._world.follow(work)
        # Back to the parameters' own type, once for all slots and ranks.
        for total, part in zip(self._sums, self._partition, strict=True):
            flat = (total[:-1].double() / self._scale).to(part[0].dtype)
            for parameter, values in zip(
                part, flat.split([p.numel() for p in part]), strict=True
            ):
                parameter.grad = values.view_as(parameter)

    def problem(self) -> Problem | None:
        # One look for all buckets: a rank that sees one out of range sees the same as all others.
        if not self._sums or not int(
            torch.stack([total[-1] for total in self._sums]).sum()
        ):
            return None
        return Problem(
            "reproducibility.elastic",
            f"a gradient is outside the range of exact sums (below {self._largest:g}), or is not a number",
            "exact mode sums gradients on a fixed grid",
            "Nothing was updated. Lower the learning rate, or use elastic: fast",
        )

    def forget(self) -> None:
        self._sums = []
        for parameter in self._parameters:
            parameter.grad = None


class ShardedSum:
    """FSDP2 reduces by itself, slot by slot, into gradients that are sharded as the weights are.

    Holding sums back until the last slot would send less, and keep the whole model's gradients on every rank.
    """

    def __init__(self, model: torch.nn.Module, *, free: Callable[[], None]) -> None:
        """``free`` frees what a slot has left gathered."""
        self._parameters = tuple(
            parameter for parameter in model.parameters() if parameter.requires_grad
        )
        self._free = free

    def begin(self, world: World) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, is_last: bool) -> None:
        """Nothing to prepare: every slot is reduced."""

    def after_backward(self) -> None:
        # FSDP2 has added the slot's sum over ranks to the sharded gradients, and freed the modules that the
        # backward pass has come through. Others would stay as they are now, through all updates to come.
        self._free()

    def finish(self) -> None:
        # FSDP2 has waited for its reductions at the end of the backward pass.
        _fill_missing(self._parameters)

    def problem(self) -> Problem | None:
        """Nothing: what is not finite shows in the norm."""
        return None

    def forget(self) -> None:
        """Nothing of its own: a sharded model does not outlive its group."""


def _fill_missing(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Give parameters that took no part in the step a gradient of zero: the optimizer would pass over one
    without a gradient.

    Then its decay and its moments would depend on whether its world sums in buckets, which are zeros where
    nothing was added.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
