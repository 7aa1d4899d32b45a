"""AdamW with decay groups, and its state as a flat dictionary of tensors."""

import torch
from torch import nn

from evergrad_manifest.training import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_adamw(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW (fused) over the trainable parameters of ``model``; vectors (norms, biases) are not decayed.

    The state is allocated at once, so that a checkpoint can be loaded into it and memory does not grow in the first step.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=settings.betas,
        eps=settings.epsilon,
        fused=True,
    )
    for parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
        }
    return optimizer


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The rate of the next update."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """``model.<name>`` and, with an optimizer, ``optimizer.<name>.<moment>``: everything a checkpoint holds.

    Tensors are the live ones, so a checkpoint is loaded in place. Tied weights appear once. Adam's own step counters are
    not here: they are all one number, which a checkpoint holds among its JSON values (:func:`set_updates`).
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = parameter.detach()
        if optimizer is not None and parameter in optimizer.state:
            for moment in MOMENTS:
                tensors[f"optimizer.{name}.{moment}"] = optimizer.state[parameter][moment]
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent:
            tensors[f"model.{name}"] = buffer
    return tensors


def set_updates(optimizer: torch.optim.Optimizer, updates: int) -> None:
    """Tell Adam's bias correction how many updates its moments have seen: finished steps less those that were skipped."""
    for state in optimizer.state.values():
        state["step"].fill_(float(updates))
