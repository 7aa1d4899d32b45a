"""Randomness keyed by (seed, step, slot, purpose), not by rank, so it is the same for every world size."""

import random
from enum import IntEnum

import numpy as np
import torch

from evergrad_trainer.base.mixing import GAMMA, MASK, mix


class Purpose(IntEnum):
    """Uses of random numbers. Never change or reuse a value, because runs would no longer be reproducible."""

    INITIAL_WEIGHTS = 1
    FORWARD = 2
    FINISHED_STEP = 3
    ADAPTERS = 4


def keyed_seed(seed: int, step: int, slot: int, purpose: Purpose) -> int:
    """Return a well-mixed seed in [0, 2**63) for one use."""
    state = 0
    for part in (seed, step, slot, int(purpose)):
        state = mix((state + part + GAMMA) & MASK)
    return state >> 1


def seed_generators(seed: int, step: int, slot: int, purpose: Purpose) -> None:
    """Seed the global generators of torch, Python and numpy.

    Dropout and initialisation use the generator of torch. Custom tasks may use the other generators.
    """
    key = keyed_seed(seed, step, slot, purpose)
    torch.manual_seed(key)
    random.seed(key)
    np.random.seed(key & 0xFFFFFFFF)
