"""A model of four parameters with a kept and a scratch buffer, and a few training steps."""

import torch
from torch import nn


class Small(nn.Module):
    """Has a matrix and vectors, so that decay groups differ, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 5)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.norm(self.embedding(ids)))
        return hidden


def train(model: Small, optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Take some steps on the same batch."""
    for _ in range(steps):
        model(torch.tensor([0, 1, 2])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
