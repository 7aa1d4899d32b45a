"""Randomness keyed by (seed, step, slot, purpose), never by rank: the same in a world of any size."""

from enum import IntEnum

import torch

from evergrad_trainer.mixing import GAMMA, MASK, mix


class Purpose(IntEnum):
    """Uses of random numbers. Values are part of what makes runs equal: never reuse one."""

    INITIAL_WEIGHTS = 1
    FORWARD = 2
    FINISHED_STEP = 3


def keyed_seed(seed: int, step: int, slot: int, purpose: Purpose) -> int:
    """Return a well mixed seed in [0, 2**63) for one use."""
    state = 0
    for part in (seed, step, slot, int(purpose)):
        state = mix((state + part + GAMMA) & MASK)
    return state >> 1


def seed_generators(seed: int, step: int, slot: int, purpose: Purpose) -> None:
    """Key torch's global generators, which dropout and initialisation draw from."""
    torch.manual_seed(keyed_seed(seed, step, slot, purpose))
