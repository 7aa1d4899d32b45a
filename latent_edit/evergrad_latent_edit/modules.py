"""Modules that are trained: the encoder of edits, and the predictor of the states behind them."""

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from evergrad_latent_edit.edits import EditType
from evergrad_latent_edit.source import MERS, NUM_MERS
from evergrad_manifest.training.latent_edit import MOST_EDITS

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
    # In fp32 under autocast, too: bf16 cannot tell neighbouring positions of a long window apart.
    steps = torch.arange(
        half,
        device=positions.device,
        dtype=torch.float32,
    )
    exponents = steps / half
    frequencies = torch.exp(-math.log(_LONGEST_WAVE) * exponents)
    angles = positions[..., None].float() * frequencies
    waves = [angles.sin(), angles.cos()]
    return torch.cat(waves, dim=-1)


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
        # Keys and values come of the same input: one product makes both.
        pair = self.key_value(other)
        keys, values = pair.chunk(2, dim=-1)
        found = functional.scaled_dot_product_attention(
            query,
            self._split(keys),
            self._split(values),
            attn_mask=allowed,
        )
        # The heads side by side again, which the last layer mixes.
        joined = found.transpose(1, 2).flatten(2)
        return torch.as_tensor(self.out(joined))

    def _split(self, values: Tensor) -> Tensor:
        heads: Tensor = values.unflatten(-1, (self.heads, -1))
        return heads.transpose(1, 2)


def _feed_forward(width: int) -> nn.Sequential:
    inner = 4 * width
    return nn.Sequential(
        nn.Linear(width, inner),
        nn.GELU(),
        nn.Linear(inner, width),
    )


class AlleleBlock(nn.Module):
    """A block of the small transformer that reads the bases of an edit."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.feed_forward = _feed_forward(width)

    def forward(self, values: Tensor) -> Tensor:
        normed = self.attention_norm(values)
        # Without a mask: all groups of bases are there, those of no base among them.
        values = values + self.attention(normed, normed, None)
        further = self.feed_forward(self.norm(values))
        return torch.as_tensor(values + further)


class ActionEncoder(nn.Module):
    """Edits as vectors: of their place, their type, and the bases before and after."""

    def __init__(self, *, width: int, allele_width: int) -> None:
        super().__init__()
        self.types = nn.Embedding(len(EditType), TYPE_WIDTH)
        self.mers = nn.Embedding(NUM_MERS, allele_width)
        self.places = nn.Parameter(torch.zeros(2 * MERS, allele_width))
        # A number of heads that divides the width, whatever width the file has.
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
        self,
        position: Tensor,
        kind: Tensor,
        reference: Tensor,
        alternate: Tensor,
        mask: Tensor,
    ) -> Tensor:
        """[B, K] places and types, [B, K, 3] groups of bases, [B, K] mask → [B, K, width].

        Where the mask is false it is a learned vector.
        """
        # Before and after in one row, told apart by their places: the small transformer compares them.
        bases = torch.cat([reference, alternate], dim=-1)
        alleles = self.mers(bases) + self.places
        # Rows and edits are one batch here, since an allele is read without its neighbours.
        values = alleles.flatten(0, 1)
        for block in self.blocks:
            values = block(values)
        pooled = self.norm(values).mean(1)
        read = pooled.unflatten(0, position.shape)

        # The waves are fp32; they join the rest in the type that autocast has chosen for it.
        place = sinusoids(position, POSITION_WIDTH)
        place = place.to(read.dtype)
        parts = [place, self.types(kind), read]
        found = self.out(torch.cat(parts, dim=-1))
        # Learned and not zero: an edit that is missing is still looked at by its own place.
        padding = self.padding.to(found.dtype)
        return torch.where(mask[..., None], found, padding)


class PredictorBlock(nn.Module):
    """The state looks at the edits, the edits at the state, and the state at what it was before each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(6))
        self.to_actions, self.to_state, self.to_self = (
            Attention(width, heads) for _ in range(3)
        )
        self.state_forward, self.action_forward = (_feed_forward(width) for _ in range(2))

    def forward(
        self, state: Tensor, actions: Tensor, allowed: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, K, W] each; ``allowed`` [B, 1, K, K]: an edit sees itself and those before it."""
        first, second, third, fourth, fifth, sixth = self.norms
        # Each looks at the newest values of the other. The order is a part of the model: stored weights were
        # trained with it.
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
        # The same order on both sides: the k-th state is the one after the k-th edit.
        values = self.state_in(state)[:, None] + order
        edits = self.action_in(actions) + order
        # Each edit may look at itself, also where there is none: a row of nothing but -inf is no number.
        device = mask.device
        square = torch.ones(count, count, dtype=torch.bool, device=device)
        causal = square.tril()
        own = torch.eye(count, dtype=torch.bool, device=device)
        seen = mask[:, None, :] | own
        allowed = (causal & seen)[:, None]
        for block in self.blocks:
            values, edits = block(values, edits, allowed)
        # Summed in fp32: a small change would be lost beside its state in bf16.
        change = self.out(self.norm(values))
        predicted: Tensor = state[:, None].float() + change.float()
        if normalize:
            predicted = functional.normalize(predicted, dim=-1)
        return predicted * mask[..., None]


class MeanTarget(nn.Module):
    """The mean of the states after edits, as the second trivial baseline; nothing of it is trained."""

    def __init__(self, mean: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
