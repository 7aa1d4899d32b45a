"""Modules that are trained: the encoder of edits, and the predictor of the states behind them."""

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from evergrad_manifest.training.latent_edit import MOST_EDITS
from evergrad_trainer.recipes.latent_edit.edits import EditType
from evergrad_trainer.recipes.latent_edit.source import MERS, NUM_MERS

POSITION_WIDTH: Final = 128
TYPE_WIDTH: Final = 64
_ALLELE_LAYERS: Final = 2
_ALLELE_HEADS: Final = 4
_LONGEST_WAVE: Final = 10_000.0


def sinusoids(positions: Tensor, width: int) -> Tensor:
    """Sines and cosines of positions: [...] → [..., width], with waves of 2π to 10000 · 2π.

    Vaswani and others, "Attention is all you need" (2017), section 3.5.
    """
    half = width // 2
    exponents = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions[..., None].float() * torch.exp(-math.log(_LONGEST_WAVE) * exponents)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)


class Attention(nn.Module):
    """Attention of one sequence to another, of several heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, own: Tensor, other: Tensor, allowed: Tensor | None) -> Tensor:
        """``own`` [B, N, W] looks at ``other`` [B, M, W] where ``allowed`` [B, 1, N, M] is true."""
        query = self._split(self.query(own))
        key, value = map(self._split, self.key_value(other).chunk(2, dim=-1))
        found = functional.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        return torch.as_tensor(self.out(found.transpose(1, 2).flatten(2)))

    def _split(self, values: Tensor) -> Tensor:
        heads: Tensor = values.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


def _feed_forward(width: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class AlleleBlock(nn.Module):
    """A block of the small transformer that reads the bases of an edit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = _feed_forward(width)

    def forward(self, values: Tensor) -> Tensor:
        normed = self.attention_norm(values)
        values = values + self.attention(normed, normed, None)
        return torch.as_tensor(values + self.feed_forward(self.norm(values)))


class ActionEncoder(nn.Module):
    """Edits as vectors: of their place, their type, and the bases before and after."""

    def __init__(self, *, width: int, allele_width: int) -> None:
        super().__init__()
        self.types = nn.Embedding(len(EditType), TYPE_WIDTH)
        self.mers = nn.Embedding(NUM_MERS, allele_width)
        self.places = nn.Parameter(torch.zeros(2 * MERS, allele_width))
        heads = math.gcd(_ALLELE_HEADS, allele_width)
        self.blocks = nn.ModuleList(
            AlleleBlock(allele_width, heads) for _ in range(_ALLELE_LAYERS)
        )
        self.norm = nn.LayerNorm(allele_width)
        inner = POSITION_WIDTH + TYPE_WIDTH + allele_width
        self.out = nn.Sequential(
            nn.Linear(inner, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.padding = nn.Parameter(torch.zeros(width))

    def forward(
        self, position: Tensor, kind: Tensor, reference: Tensor, alternate: Tensor, mask: Tensor
    ) -> Tensor:
        """[B, K] places and types, [B, K, 3] groups of bases, [B, K] mask → [B, K, width].

        Where the mask is false it is a learned vector.
        """
        alleles = self.mers(torch.cat([reference, alternate], dim=-1)) + self.places
        values = alleles.flatten(0, 1)
        for block in self.blocks:
            values = block(values)
        read = self.norm(values).mean(1).unflatten(0, position.shape)
        place = sinusoids(position, POSITION_WIDTH).to(read.dtype)
        found = self.out(torch.cat([place, self.types(kind), read], dim=-1))
        return torch.where(mask[..., None], found, self.padding.to(found.dtype))


class PredictorBlock(nn.Module):
    """The state looks at the edits, the edits at the state, and the state at what it was before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.to_actions, self.to_state, self.to_self = (
            Attention(width, heads) for _ in range(3)
        )
        self.state_forward, self.action_forward = (_feed_forward(width) for _ in range(2))

    def forward(self, state: Tensor, actions: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, W] each; ``allowed`` [B, 1, K, K]: an edit sees itself and those before it."""
        first, second, third, fourth, fifth, sixth = self.norms
        state = state + self.to_actions(first(state), second(actions), allowed)
        actions = actions + self.to_state(second(actions), third(state), allowed)
        own = fourth(state)
        state = state + self.to_self(own, own, allowed)
        state = state + self.state_forward(fifth(state))
        return state, actions + self.action_forward(sixth(actions))


class Predictor(nn.Module):
    """The state after each of some edits, from the state before them."""

    def __init__(
        self, *, state_width: int, action_width: int, width: int, layers: int, heads: int
    ) -> None:
        super().__init__()
        self.state_in = nn.Linear(state_width, width)
        self.action_in = nn.Linear(action_width, width)
        self.order = nn.Parameter(torch.zeros(MOST_EDITS, width))
        self.blocks = nn.ModuleList(PredictorBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, state_width)
        # At first the prediction is the state as it was: the trivial baseline, from which it learns.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(
        self, state: Tensor, actions: Tensor, mask: Tensor, *, normalize: bool
    ) -> Tensor:
        """[B, D], [B, K, A], [B, K] → [B, K, D] in fp32, 0 where the mask is false."""
        count = actions.shape[1]
        order = self.order[:count]
        values = self.state_in(state)[:, None] + order
        edits = self.action_in(actions) + order
        # Each edit may look at itself, also where there is none: a row of nothing but -inf is no number.
        causal = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()
        own = torch.eye(count, dtype=torch.bool, device=mask.device)
        allowed = (causal & (mask[:, None, :] | own))[:, None]
        for block in self.blocks:
            values, edits = block(values, edits, allowed)
        predicted: Tensor = state[:, None].float() + self.out(self.norm(values)).float()
        if normalize:
            predicted = functional.normalize(predicted, dim=-1)
        return predicted * mask[..., None]


class MeanTarget(nn.Module):
    """The mean of the states after edits, as the second trivial baseline; nothing of it is trained."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
