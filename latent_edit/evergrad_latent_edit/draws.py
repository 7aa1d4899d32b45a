"""Random numbers of one item: a sequence that its key alone decides, so that no item waits for another."""

from typing import Final

from evergrad_trainer.base.mixing import GAMMA, MASK, mix

LONGEST_INDEL: Final = 15
"""Bases that a synthetic edit adds or takes: a sixteenth is the anchor."""


class Draws:
    """splitmix64 from a key."""

    def __init__(self, key: int) -> None:
        self._state = key & MASK

    def bits(self) -> int:
        """64 bits."""
        self._state = (self._state + GAMMA) & MASK
        return mix(self._state)

    def below(self, bound: int) -> int:
        """A number of [0, bound); its bias is below bound / 2**64."""
        return (self.bits() * bound) >> 64

    def indel_length(self) -> int:
        """A length by halves (1 with the chance 1/2, 2 with 1/4 …) of 1 to 16, of which 16 becomes 15."""
        # All 65535 = 2**16 - 1 outcomes are equally likely: the number of leading zeros is the length.
        outcome = self.below(2**16 - 1) + 1
        length = 17 - outcome.bit_length()
        return min(length, LONGEST_INDEL)
