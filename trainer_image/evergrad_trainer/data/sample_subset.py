"""A fixed subset of a source's items, which depends only on the seed and the content of the source."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import xxhash

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.data.batch import Rows, Source
from evergrad_trainer.data.order import Permutation

_CHOICE: Final = 1
"""Value for the epoch in the key of the permutation. Held-out documents use 0."""


class Chosen:
    """The first ``count`` items of a source in a fixed permutation."""

    def __init__(self, source: Source, count: int, *, seed: int) -> None:
        self._source = source
        self._count = count
        self.fill: Mapping[str, int] = source.fill
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            f"{source.fingerprint} {count} {seed}".encode()
        )
        # Use the content as the key, so that the subset depends neither on names nor on other sources.
        key = xxhash.xxh64_intdigest(source.fingerprint.encode())
        self._place = Permutation(seed=seed, source=key, epoch=_CHOICE, size=len(source))

    def __len__(self) -> int:
        return self._count

    def read(self, items: Sequence[int]) -> Rows:
        """Read the items with these numbers. Raises IndexError if an item does not exist."""
        return self._source.read([self._place(self._checked(item)) for item in items])

    def describe(self, item: int) -> str:
        """Return the origin of an item, for messages."""
        return self._source.describe(self._place(self._checked(item)))

    def _checked(self, item: int) -> int:
        # Check the range, because the permutation contains items that are not chosen.
        if not 0 <= item < self._count:
            raise IndexError(f"{item} is outside the {self._count} chosen samples")
        return item


def choose_samples(
    source: Source, samples: float | None, *, seed: int, field: str
) -> Source:
    """Return ``source``, or a subset of it.

    ``samples``: the number of items (an int), the share of items (a float), or None for all items. For
    example, 0.1 selects 10%. ``field``: the manifest field, for messages. Raises ConfigurationError if the
    source has fewer items.
    """
    if samples is None:
        return source
    size = len(source)
    count = int(samples)
    if isinstance(samples, float):
        count = max(1, int(size * Fraction(repr(samples)) + Fraction(1, 2)))
    if count > size:
        what = f"{count} are wanted and the source has {size}"
        remedy = "Lower it, or repeat the source by `mixing: passes` and its weight"
        raise ConfigurationError(Problem(field, what, "each exists once", remedy))
    return Chosen(source, count, seed=seed)
