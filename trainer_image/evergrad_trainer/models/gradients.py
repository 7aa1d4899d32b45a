"""Sums the gradients of a step over its slots and all ranks.

Plain data parallelism reduces flat buckets instead of wrapping the model, so that the group can change
between two steps. The order of calls is: ``begin`` → for each slot: ``before_backward``, backward,
``after_backward`` → ``finish`` → wait for the device → ``problem``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from evergrad_manifest.errors import Problem
from evergrad_trainer.distributed.transports import Pending
from evergrad_trainer.distributed.world import World


class GradientSum(Protocol):
    """Sums gradients over slots and ranks. After ``finish``, each ``parameter.grad`` contains the sum."""

    def begin(self, world: World) -> None:
        """Drop the gradients of the last step, and start a step of ``world``."""

    def before_backward(self, *, is_last: bool) -> None:
        """Prepare for a slot's gradients.

        ``is_last``: whether this is the rank's last slot of the step, after which its own sum is final.
        """

    def after_backward(self) -> None:
        """Add the slot's gradients, after the backward pass has computed all of them."""

    def finish(self) -> None:
        """Set each ``parameter.grad`` to the sum over all slots of all ranks.

        On an accelerator, the sums are launched without waiting: see :meth:`World.follow`. Raises
        PeerLostError if a rank is lost.
        """

    def problem(self) -> Problem | None:
        """Return the reason why the sums are not valid, the same on every rank; None if they are valid.

        Call it only after the sums have completed: see :meth:`World.await_started`.
        """

    def forget(self) -> None:
        """Drop all buffers, because a collective that has not ended may still write to them."""


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
    """Divide the parameters into buckets, in reverse order, which is about the order of the backward pass.

    A new bucket starts if the bucket is full, or if the type or the device changes.
    """
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
    """Sums over slots in place, then over ranks bucket by bucket, during the last backward pass."""

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
        # Drop sums of an interrupted step, because their group no longer exists.
        self._works = []
        self._is_armed = False
        if world.group is None:
            # With one rank, use the gradients of autograd: buckets would only cost memory and a copy.
            self._buckets, self._bucket_of = [], {}
            for parameter in self._parameters:
                parameter.grad = None
            return
        # Create the buckets in the first step with several ranks, and keep them: parameters do not change.
        if not self._buckets:
            self._buckets = [
                _Bucket(part) for part in _partition(self._parameters, self._bucket_bytes)
            ]
            self._bucket_of = {
                p: bucket for bucket in self._buckets for p in bucket.parameters
            }
        # autograd adds to an existing gradient, so all slots are summed directly in the buckets.
        for bucket in self._buckets:
            bucket.flat.zero_()
            bucket.missing = len(bucket.parameters)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view

    def before_backward(self, *, is_last: bool) -> None:
        # Send buckets only in the last slot: a bucket that is sent earlier would lack later slots.
        self._is_armed = is_last and bool(self._buckets)

    def after_backward(self) -> None:
        """Do nothing, because autograd has added the gradients to the views of the buckets."""

    def finish(self) -> None:
        for bucket in self._buckets[len(self._works) :]:
            # Reduce the remaining buckets: the hook of a parameter that the last slot did not use never ran.
            self._reduce(bucket)
        works, self._works = self._works, []
        # Collective: wait for all sums. The first buckets were summed during the backward pass, so this wait
        # is short.
        for work in works:
            self._reducing_world.follow(work)
        _fill_missing(self._parameters)

    def problem(self) -> Problem | None:
        """Return None: values that are not finite are detected by the gradient norm."""
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
        # Every rank must start the buckets in the same order, also if its gradients arrive in another order.
        while (
            len(self._works) < len(self._buckets)
            and self._buckets[len(self._works)].missing == 0
        ):
            self._reduce(self._buckets[len(self._works)])

    def _reduce(self, bucket: _Bucket) -> None:
        self._works.append(self._reducing_world.start_sum(bucket.flat))


class ExactSum:
    """Sums that do not depend on the order: gradients are rounded to a fixed grid and added as integers.

    Each slot's gradient is rounded to multiples of 2**-44 (5.7e-14) and summed as 64-bit integers; sums up to
    2**18 fit. Integer addition is associative, so every world size gives the same bits. This costs 8 bytes
    per parameter, and the sums do not overlap with the backward pass. If a slot could leave the range, its
    gradient is not added. Instead, it is counted in an extra element at the end of each sum, so that all
    ranks detect it in the same step.
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
        # Clear the gradients, because each slot's gradients are rounded before they are added.
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, is_last: bool) -> None:
        """Do nothing, because the reduction starts after all slots."""

    def after_backward(self) -> None:
        for total, part in zip(self._sums, self._partition, strict=True):
            # A parameter that the slot did not use has no gradient.
            flat = torch.cat(
                [
                    (torch.zeros_like(p) if p.grad is None else p.grad).flatten()
                    for p in part
                ]
            )
            # This comparison is also false for NaN. Keep the result on the device: reading it here would make
            # an accelerator wait for the host at every bucket of every slot.
            fits = flat.abs().amax() < self._largest
            whole = torch.where(fits, flat.double(), 0.0)
            total[:-1] += (whole * self._scale).round_().to(torch.int64)
            total[-1] += ~fits
            for parameter in part:
                parameter.grad = None

    def finish(self) -> None:
        # Collective: start all sums before waiting for the first; every rank starts them in the same order.
        if self._world is not None and self._world.group is not None:
            works = [self._world.start_sum(total) for total in self._sums]
            for work in works:
                self._world.follow(work)
        # Convert to the type of the parameters after the sum over all slots and ranks, so that the result is
        # rounded only one time.
        for total, part in zip(self._sums, self._partition, strict=True):
            flat = (total[:-1].double() / self._scale).to(part[0].dtype)
            for parameter, values in zip(
                part, flat.split([p.numel() for p in part]), strict=True
            ):
                parameter.grad = values.view_as(parameter)

    def problem(self) -> Problem | None:
        # Read the counts of all buckets in one transfer. They are sums over ranks, so all ranks read the same
        # values.
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
    """Gradient sums of FSDP2, which reduces each slot into gradients that are sharded like the weights.

    Reducing only after the last slot would send less data, but keep the gradients of the whole model on every
    rank.
    """

    def __init__(self, model: torch.nn.Module, *, free: Callable[[], None]) -> None:
        """``free``: called after each slot to free weights that are still gathered."""
        self._parameters = tuple(
            parameter for parameter in model.parameters() if parameter.requires_grad
        )
        self._free = free

    def begin(self, world: World) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def before_backward(self, *, is_last: bool) -> None:
        """Do nothing, because FSDP2 reduces every slot."""

    def after_backward(self) -> None:
        # FSDP2 has added the slot's sum over ranks to the sharded gradients, and freed the modules that the
        # backward pass used. Free the other modules, which would otherwise keep outdated weights.
        self._free()

    def finish(self) -> None:
        # FSDP2 has waited for its reductions at the end of the backward pass.
        _fill_missing(self._parameters)

    def problem(self) -> Problem | None:
        """Return None: values that are not finite are detected by the gradient norm."""
        return None

    def forget(self) -> None:
        """Do nothing, because a sharded model is discarded together with its group."""


def _fill_missing(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Set the gradient of parameters that the step did not use to zero.

    The optimizer skips a parameter without a gradient. Without this function, weight decay and moments of
    such a parameter would depend on whether the world uses buckets, in which an unused parameter has zeros.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
