"""Randomness keyed by (seed, step, slot, purpose), never by rank: the same in a world of any size."""

from enum import IntEnum

import torch

_MASK = 2**64 - 1


class Purpose(IntEnum):
    """What random numbers are drawn for. Values are part of what makes runs equal: never reuse one."""

    INITIAL_WEIGHTS = 1
    FORWARD = 2
    FINISHED_STEP = 3


def keyed_seed(seed: int, step: int, slot: int, purpose: Purpose) -> int:
    """A well mixed seed in [0, 2**63) for one use (splitmix64 finaliser; Steele et al., 2014)."""
    state = 0
    for part in (seed, step, slot, int(purpose)):
        state = (state + part + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_generators(seed: int, step: int, slot: int, purpose: Purpose) -> None:
    """Key torch's global generators, which dropout and initialisation draw from."""
    torch.manual_seed(keyed_seed(seed, step, slot, purpose))
