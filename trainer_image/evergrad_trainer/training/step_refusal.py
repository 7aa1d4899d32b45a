"""Decides why a step must not update anything; the reasons name the step, the slot and its samples."""

import math
from collections.abc import Callable
from dataclasses import replace

from evergrad_manifest.errors import Problem
from evergrad_trainer.optim.loss_scale import LossScale
from evergrad_trainer.training.exchange import Totals


def refuse(
    step: int,
    totals: Totals,
    norm: float,
    overflow: Problem | None,
    *,
    describe_samples: Callable[[int], str],
    loss_scale: LossScale | None = None,
) -> tuple[str | None, tuple[Problem, ...]]:
    """Return one of causes.SKIPS with its problems, or None; the same on every rank, because the inputs are.

    ``overflow``: the problem that prevented the sums of the gradients. ``describe_samples``: names the
    samples of a slot in messages. ``loss_scale``: the scale that the loss was multiplied by.
    """
    # Check losses first: a loss identifies its slot and samples, but a gradient does not.
    losses = tuple(
        Problem(
            f"step {step}, slot {slot}",
            f"the loss is {loss}",
            f"its samples are {describe_samples(slot)}",
            "Nothing was updated. Look at these samples, name the step in spec.training.skipSteps, "
            "or lower the learning rate",
        )
        for slot, loss in enumerate(totals.losses)
        if not math.isfinite(loss)
    )
    if losses:
        return "loss", losses
    is_spoiled = overflow is not None or not math.isfinite(norm)
    if is_spoiled and loss_scale is not None and loss_scale.can_fall:
        what = f"a gradient is no finite number in fp16 at a loss scale of {loss_scale.value:g}"
        why = "a scale is raised until gradients overflow, and halved where they do"
        return "overflow", (Problem(f"step {step}", what, why, "Nothing was updated"),)
    if overflow is not None:
        return "grad", (replace(overflow, path=f"step {step}, {overflow.path}"),)
    if not math.isfinite(norm):
        why = "all losses of the step are finite, so the backward pass overflowed"
        remedy = (
            "Nothing was updated. Lower the learning rate or use a wider precision; "
            "the state before the step is good"
        )
        return "grad", (
            Problem(f"step {step}", f"the gradient norm is {norm}", why, remedy),
        )
    if totals.weight == 0:
        why = "every label of its samples is masked"
        remedy = "Nothing was updated. Look at the data"
        return "empty", (Problem(f"step {step}", "no token carries a loss", why, remedy),)
    return None, ()
