"""AdamW with decay groups. Its state is allocated from the beginning, and an element gets the same update
whether or not its tensor is sharded."""

from collections.abc import Callable, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from evergrad_manifest.training import Optimizer
from evergrad_trainer.optim.groups import Group, group_parameters
from evergrad_trainer.optim.parts import TensorPart, update_parts

MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW(torch.optim.AdamW):
    """torch's fused AdamW. If ranks hold parts of tensors on the CPU, each part gets the same bits as in the
    whole tensor."""

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient."""
        parameters = [
            parameter for group in self.param_groups for parameter in group["params"]
        ]
        on_host = [parameter for parameter in parameters if not parameter.is_cuda]
        if not any(isinstance(parameter, DTensor) for parameter in on_host):
            # Whole tensors, or tensors on an accelerator, whose kernel computes each element independently.
            loss: float | None = super().step(closure)
            return loss
        if closure is not None:
            raise ValueError("a sharded AdamW takes no closure")
        for group in self.param_groups:
            # Update all parts of a group with the same number of updates in one kernel call: in ordinary
            # training, these are all parts.
            by_updates: dict[float, list[TensorPart]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                part = TensorPart(
                    weights=_local(parameter),
                    gradient=_local(parameter.grad),
                    exp_avg=_local(state["exp_avg"]),
                    exp_avg_sq=_local(state["exp_avg_sq"]),
                    begin=_begin(parameter),
                    total=parameter.numel(),
                )
                updates = float(state["step"])
                by_updates.setdefault(updates, []).append(part)
                # Count before the update, as torch does.
                state["step"] += 1
            for updates, parts in by_updates.items():
                update_parts(
                    parts,
                    updates=int(updates),
                    learning_rate=group["lr"],
                    betas=group["betas"],
                    epsilon=group["eps"],
                    weight_decay=group["weight_decay"],
                )
        return None


def build_adamw(model: nn.Module, settings: Optimizer) -> AdamW:
    """Build a fused AdamW over the trainable parameters of ``model``. Vectors (norms, biases) are not
    decayed."""
    return adamw_over(group_parameters(model, settings), settings)


def adamw_over(groups: Sequence[Group], settings: Optimizer) -> AdamW:
    """Build a fused AdamW over ``groups``.

    The state is allocated immediately, so that a checkpoint can be loaded into it and memory does not grow in
    the first step.
    """
    optimizer = AdamW(
        list(groups),
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in [one for group in groups for one in group["params"]]:
        # Keep the count on the device: the fused kernel counts there, and the host need not wait for it.
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        optimizer.state[parameter] = {"step": count, **moments}
    return optimizer


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor as a flat view."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach().view(-1)


def _begin(parameter: torch.Tensor) -> int:
    """Return the offset, in elements of the whole tensor, of this rank's part; tensors are sharded by
    rows."""
    if not isinstance(parameter, DTensor):
        return 0
    if parameter.ndim == 0 or _local(parameter).numel() == 0:
        return 0
    sharded: Any = parameter  # DCP's protocol for sharded tensors carries no types
    (chunk,) = sharded.__create_chunk_list__()
    row_size = parameter.numel() // parameter.shape[0]
    return int(chunk.offsets[0]) * row_size
