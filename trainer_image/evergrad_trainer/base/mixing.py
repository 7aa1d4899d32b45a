"""splitmix64, the mixing function for the sample order and for the keys of all random numbers.

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014). The reproducibility of
runs depends on these values, so they must never change.
"""

from typing import Final

MASK: Final = 2**64 - 1
GAMMA: Final = 0x9E3779B97F4A7C15
"""The odd number that is added between two values. Without it, zero would always map to zero."""
_MIX_A: Final = 0xBF58476D1CE4E5B9
_MIX_B: Final = 0x94D049BB133111EB


def mix(value: int) -> int:
    """Return splitmix64's finalizer of ``value``, a bijection of 64-bit integers that spreads their bits."""
    value = ((value ^ (value >> 30)) * _MIX_A) & MASK
    value = ((value ^ (value >> 27)) * _MIX_B) & MASK
    return value ^ (value >> 31)
