"""The published sample order: a stateless keyed permutation, sample ids and their 64-bit hashes.

Do not change the results of this module: a change would silently reorder the data of every resumed run. Tests
pin golden values. Reference: docs/decisions/0002-data-order.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from evergrad_trainer.base.mixing import GAMMA, MASK, mix
from evergrad_trainer.data.start_positions import SourcePosition

Integers = npt.NDArray[np.uint64]

MAX_SIZE: Final = 2**62
_ROUND_A: Final = 0x9FB21C651E98DF25
_ROUND_B: Final = 0xD6E8FEB86659FD93
_ROUNDS: Final = 8
"""Rounds of the Feistel network. With 4 rounds, sizes below 100 are measurably uneven; with 6 rounds, sizes
below 10. 8 rounds pass at every tested size."""
_FEW: Final = 16
"""Number of values up to which plain integers are faster than arrays."""
_CACHED_PERMUTATIONS: Final = 256


@dataclass(frozen=True, slots=True)
class SampleId:
    """One window of a source in one epoch. ``source`` is the index of the source in ``data.sources``."""

    source: int
    epoch: int
    window: int


def absorb(*values: int) -> int:
    """Return a 64-bit hash of a sequence of integers, each taken modulo 2**64. The order matters."""
    state = 0
    for value in values:
        mixed_in = state ^ (value & MASK)
        state = mix((mixed_in + GAMMA) & MASK)
    return state


def sample_hash(position: int, sample: SampleId) -> int:
    """Return the 64-bit hash of a sample at its position in the stream.

    The hash of a step is the sum of the hashes of its samples modulo 2**64.
    """
    return absorb(position, sample.source, sample.epoch, sample.window)


class Permutation:
    """A bijection of [0, size), keyed by (seed, source, epoch), with O(1) memory and O(1) random access.

    It is a balanced Feistel network over the smallest domain with an even number of bits that contains
    ``size``. A value outside [0, size) is permuted again until it is inside (cycle walking), at most about
    four times on average.
    """

    def __init__(self, *, seed: int, source: int, epoch: int, size: int) -> None:
        if not 1 <= size <= MAX_SIZE:
            raise ValueError(f"a permutation has 1 to {MAX_SIZE} elements, not {size}")
        self.size = size
        num_bits = (size - 1).bit_length()
        self._half_bits = max(1, (num_bits + 1) // 2)
        self._keys = tuple(absorb(seed, source, epoch, number) for number in range(_ROUNDS))

    def __call__(self, index: int) -> int:
        """Return the image of ``index``. Raises IndexError if it is outside [0, size)."""
        if not 0 <= index < self.size:
            raise IndexError(f"{index} is outside a permutation of {self.size}")
        # Cycle walking: the domain is at most four times as large, so few iterations are needed.
        value = self._scatter(index)
        while value >= self.size:
            value = self._scatter(value)
        return value

    def many(self, indices: Integers) -> Integers:
        """Return the images of ``indices``, both uint64 of shape (n,).

        Raises IndexError if an index is outside [0, size).
        """
        largest = int(indices.max()) if indices.size else 0
        if largest >= self.size:
            raise IndexError(f"{largest} is outside a permutation of {self.size}")
        if indices.size <= _FEW:
            moved_alone = [self(index) for index in indices.tolist()]
            return np.array(moved_alone, dtype=np.uint64)

        # Cycle walking: repeat for the values that are still outside.
        values = self._scatter_many(indices)
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            moved = self._scatter_many(values[outside])
            values[outside] = moved
            outside = outside[moved >= self.size]
        return values

    def _scatter(self, value: int) -> int:
        half = self._half_bits
        shift = 64 - half
        left = value >> half
        right = value & ((1 << half) - 1)
        for key in self._keys:
            scrambled = ((right ^ key) * _ROUND_A) & MASK
            scrambled ^= scrambled >> 32
            scrambled = (scrambled * _ROUND_B) & MASK
            # Use the upper bits, because they depend on all bits of the product.
            left, right = right, left ^ (scrambled >> shift)
        return left << half | right

    def _scatter_many(self, values: Integers) -> Integers:
        # The same as ``_scatter``, without masks, because arrays of uint64 wrap.
        half = np.uint64(self._half_bits)
        shift = np.uint64(64 - self._half_bits)
        lower = np.uint64((1 << self._half_bits) - 1)
        left = values >> half
        right = values & lower
        for key in self._keys:
            scrambled = (right ^ np.uint64(key)) * np.uint64(_ROUND_A)
            scrambled ^= scrambled >> np.uint64(32)
            scrambled *= np.uint64(_ROUND_B)
            left, right = right, left ^ (scrambled >> shift)
        return left << half | right


class ItemOrders:
    """The endless sequence of each source's items: epoch after epoch, each with a new permutation.

    ``places``: the start position of each source and the key of its permutations. If it is empty, a source
    starts at its first item and its key is its index.
    """

    def __init__(
        self, sizes: Sequence[int], *, seed: int, places: Sequence[SourcePosition] = ()
    ) -> None:
        own_sizes = tuple(sizes)
        numbers = [one.number for one in places] or list(range(len(own_sizes)))
        self.taken = tuple(one.taken for one in places) or (0,) * len(own_sizes)
        """Number of items of each source that were used before."""
        self._sizes = own_sizes

        @lru_cache(maxsize=_CACHED_PERMUTATIONS)
        def permutation(source: int, epoch: int) -> Permutation:
            return Permutation(
                seed=seed, source=numbers[source], epoch=epoch, size=own_sizes[source]
            )

        # Cache permutations, because consecutive slots nearly always use the same epochs.
        self._permutation = permutation

    def item(self, source: int, index: int) -> SampleId:
        """Return the item at ``index`` (from 0) of the sequence of ``source``."""
        epoch, place = divmod(self.taken[source] + index, self._sizes[source])
        return SampleId(source, epoch, self._permutation(source, epoch)(place))
