"""AdamW with decay groups, its state allocated from the beginning."""

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
