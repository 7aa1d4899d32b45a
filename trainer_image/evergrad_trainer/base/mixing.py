"""splitmix64: the one mixing function behind the sample order and the keys of all random numbers.

Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). Its values are part of what
makes runs equal and never change.
"""

from typing import Final

MASK: Final = 2**64 - 1
GAMMA: Final = 0x9E3779B97F4A7C15
"""The odd number that is added between two values, so that a run of zeros does not stay zero."""
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


def mix(value: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit integers that scatters them."""
    value = ((value ^ (value >> 30)) * _MIX_A) & MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & MASK
    return value ^ (value >> 31)
