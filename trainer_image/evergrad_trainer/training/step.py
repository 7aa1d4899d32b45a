"""One optimizer step: this rank's micro-batches → loss → backward → sums over ranks → check → update."""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.errors import Problem
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.device_memory import Sizes, report_device_memory
from evergrad_trainer.base.errors import PeerLostError
from evergrad_trainer.data.batch import Batch
from evergrad_trainer.distributed.transports import mark_launched
from evergrad_trainer.distributed.world import World
from evergrad_trainer.models.determinism import raise_if_not_deterministic
from evergrad_trainer.models.randomness import Purpose, seed_generators
from evergrad_trainer.optim.groups import set_learning_rate
from evergrad_trainer.optim.schedule import value_at
from evergrad_trainer.task import Loss
from evergrad_trainer.training.exchange import Sums, Totals
from evergrad_trainer.training.step_parts import (
    NoHeartbeat,
    StepHeartbeat,
    StepOutcome,
    StepParts,
    StepSettings,
)
from evergrad_trainer.training.step_refusal import refuse

_EPSILON = 1e-6
"""The constant that torch's own clipping adds to a norm before it divides by the norm."""


class Stepper:
    """Runs steps.

    It keeps nothing of a world: each step reads rank, size and group from its argument.
    """

    def __init__(self, parts: StepParts, settings: StepSettings) -> None:
        self._parts = parts
        self._settings = settings
        # The worker replaces both; its supervisor reads them.
        self.heartbeat: StepHeartbeat = NoHeartbeat()
        self.on_memory: Callable[[Sizes], None] | None = None

    def run(
        self, step: int, world: World, flags: tuple[bool, ...], *, is_skipped: bool = False
    ) -> StepOutcome:
        """Train step ``step``, counted from 1. With ``is_skipped``, compute nothing and only exchange the
        flags.

        If a loss or gradient is not finite, no rank makes an update, and the outcome reports the reason.
        Raises PeerLostError before anything is updated. No collective follows :meth:`Sums.exchange`: a rank
        that has passed it finishes the step, even if other ranks fail.
        """
        parts, settings, clock = self._parts, self._settings, self._parts.clock
        loss_scale = None if parts.loss_scale is None else parts.loss_scale.value
        sums = Sums(
            step,
            world,
            flags,
            num_slots=settings.slots_per_step,
            names=settings.metrics,
            without=parts.stream.stage(step).without,
        )
        norm: torch.Tensor | None = None
        overflow: Problem | None = None
        clock.begin()

        if not is_skipped:
            # Compute this rank's micro-batches. Collectives inside: the last backward pass begins to sum the
            # gradients, and FSDP2 gathers sharded parameters in every pass.
            self._compute(step, world, sums)
            # Collectives: finish the sums. Do this even if a loss is not finite, because all ranks have begun
            # the same sums. The step waits for an accelerator only here, as late as possible.
            norm, overflow = self._sum_gradients(world)

        # The last collective: flags, weights, hashes, losses, the norm and the step numbers of all ranks, in
        # one small vector. Each rank waits here for the slowest rank.
        totals = sums.exchange(norm, busy_seconds=clock.busy_seconds())
        scale = settings.nominal_weight / max(1, totals.weight) / (loss_scale or 1.0)
        grad_norm = math.nan if overflow else totals.norm * scale
        clock.mark("communication")

        # From here on, no rank waits for another: either all ranks make the update, or none.
        skipped: str | None = "requested"
        problems: tuple[Problem, ...] = ()
        if not is_skipped:
            skipped, problems = self._follow(step, totals, grad_norm, overflow, scale=scale)
        clock.mark("optimizer")
        report_device_memory(world.device, self.on_memory)

        outcome = totals.outcome(
            step,
            skipped=skipped,
            problems=problems,
            learning_rate=parts.schedule(step),
            grad_norm=grad_norm,
            seconds=clock.seconds(),
        )
        return replace(outcome, loss_scale=loss_scale)

    def warm_up(self, world: World) -> None:
        """Compile and allocate what the first step needs, without changing the state: compute one slot and
        discard its gradients."""
        parts = self._parts
        step = parts.stream.first_step
        batch = parts.prefetcher.take(step, 0)
        # Not collective: the slot is not the last one, so nothing is summed over ranks.
        parts.gradients.begin(world)
        with parts.buffers.restoring():
            self._forward_backward(step, 0, batch, world=world, scale=0.0, is_last=False)
        parts.gradients.forget()

    def forget_buffers(self) -> None:
        """Release the gradients' buffers: see :meth:`GradientSum.forget`."""
        self._parts.gradients.forget()

    def _compute(self, step: int, world: World, sums: Sums) -> None:
        """Run the forward and backward passes of this rank's slots."""
        parts, settings, clock = self._parts, self._settings, self._parts.clock
        parts.gradients.begin(world)
        slots = share_slots(
            settings.slots_per_step, world.rank, world.size, is_sharded=settings.is_sharded
        )
        for slot, is_real, is_last in slots:
            # A slot of a large model takes seconds, so check before each slot whether the group has ended.
            world.raise_if_given_up()
            self.heartbeat.beat(step, slot)

            # While this rank computes, read the samples that it will probably need next. After a change of
            # the world the guess is wrong, which costs only the read.
            following = slot + world.size
            upcoming = (step, following)
            if following >= settings.slots_per_step:
                upcoming = (step + 1, world.rank)
            batch = parts.prefetcher.take(step, slot, upcoming=[upcoming])
            clock.mark("data")

            try:
                loss = self._forward_backward(
                    step,
                    slot,
                    batch,
                    world=world,
                    scale=float(is_real),
                    is_last=is_last,
                )
            except Exception as error:
                raise_if_not_deterministic(error)
                if not isinstance(error, PeerLostError):
                    samples = self._describe_samples(step, slot)
                    error.add_note(
                        f"in step {step}, slot {slot}; its samples are {samples}"
                    )
                raise
            if is_real:
                sums.add(slot, batch, loss)
            clock.mark("forward_backward")

    def _sum_gradients(self, world: World) -> tuple[torch.Tensor, Problem | None]:
        """Sum the gradients over all ranks.

        Returns the norm of the sums, on the device, and the problem that prevented the sums, or None.
        """
        gradients = self._parts.gradients
        # On a CPU, launched work is complete, so this rank only waits for peers. An accelerator may still
        # compute.
        computed = mark_launched(world.device)
        if computed.is_completed():
            self.heartbeat.rest()

        # Collective: begin the sums that the last backward pass has not begun, and finish all of them.
        gradients.finish()
        norm = nn.utils.get_total_norm(self._gradients())
        # Collective if gradients are sharded: combine the norms of the parts.
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

        # Everything is launched. Wait until the device has finished this rank's own work, then for the sums.
        # If they do not arrive, the rank ends here, before other ranks wait for it in the exchange.
        world.wait(computed)
        self.heartbeat.rest()
        world.await_started()
        return norm, gradients.problem()

    def _forward_backward(
        self,
        step: int,
        slot: int,
        batch: Batch,
        *,
        world: World,
        scale: float,
        is_last: bool,
    ) -> Loss:
        parts, settings, device = self._parts, self._settings, world.device
        # Random numbers depend on the slot, not on the rank that computes it.
        seed_generators(settings.seed, step, slot, Purpose.FORWARD)
        tensors = {
            name: tensor.to(device, non_blocking=True)
            for name, tensor in batch.tensors.items()
        }
        parts.gradients.before_backward(is_last=is_last)
        # Collectives: FSDP2 gathers in both passes, and the last backward pass begins to sum gradients.
        stage = parts.stream.stage(step)
        watching = parts.buffers.watching(stage, num_workers=world.size)
        with watching, parts.autocast():
            loss = parts.loss_of(tensors, stage)
        # Divide here, not after the sum, so that gradients of large batches do not overflow their type.
        share = scale / settings.nominal_weight
        if parts.loss_scale is not None:
            share *= parts.loss_scale.value
        (loss.total * share).backward()
        parts.gradients.after_backward()
        # Return the values without the graph. Its small nodes would fragment the heap between the activations
        # that are freed, so that the activations of the next slot would not fit.
        return Loss(
            loss.total.detach(), {name: part.detach() for name, part in loss.parts.items()}
        )

    def _follow(
        self,
        step: int,
        totals: Totals,
        norm: float,
        overflow: Problem | None,
        *,
        scale: float,
    ) -> tuple[str | None, tuple[Problem, ...]]:
        """Make the update, or return the reason for making none: see :func:`refuse`."""
        loss_scale = self._parts.loss_scale
        skipped, problems = refuse(
            step,
            totals,
            norm,
            overflow,
            describe_samples=functools.partial(self._describe_samples, step),
            loss_scale=loss_scale,
        )
        if skipped is None:
            self._update(step, scale, norm)
        if loss_scale is not None:
            loss_scale.follow(skipped)
        return skipped, problems

    def _update(self, step: int, scale: float, norm: float) -> None:
        """Scale the gradients to the mean per unit of weight, clip them, and update the parameters."""
        limit = value_at(step, self._settings.clip_norm, self._settings.clip_norms)
        is_too_long = bool(limit) and norm > limit
        shrinkage = limit / (norm + _EPSILON) if is_too_long else 1.0
        factor = scale * shrinkage
        # Scale all gradients in one pass for both purposes; skip the pass if the factor is 1.
        if factor != 1.0:
            torch_private.scale(self._gradients(), factor)
        set_learning_rate(self._parts.optimizer, self._parts.schedule(step))
        self._parts.optimizer.step()

    def _gradients(self) -> list[torch.Tensor]:
        parameters = self._parts.model.parameters()
        return [one.grad for one in parameters if one.grad is not None]

    def _describe_samples(self, step: int, slot: int) -> str:
        stream = self._parts.stream
        samples = stream.slot(step, slot).samples
        return ", ".join(stream.describe(sample) for sample in samples)


def share_slots(
    num_slots: int, rank: int, size: int, *, is_sharded: bool
) -> Iterator[tuple[int, bool, bool]]:
    """Return (slot, is_real, is_last) for each micro-batch of ``rank``, in order.

    Sharded ranks must all run the same number of micro-batches. A rank without another slot repeats its first
    slot with weight 0. For example, if ``num_slots`` is 3 and ``size`` is 2, rank 1 runs slot 1 twice, and
    the second time is not real.
    """
    own = list(range(rank, num_slots, size))
    rounds = math.ceil(num_slots / size) if is_sharded else len(own)
    for index in range(rounds):
        is_last = index == rounds - 1
        if index < len(own):
            yield own[index], True, is_last
        else:
            # The result is not counted, but sharded ranks gather each other's parameters in every pass.
            yield (own[0] if own else 0), False, is_last
