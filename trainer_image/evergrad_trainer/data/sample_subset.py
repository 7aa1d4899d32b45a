"""A fixed part of a source's items, chosen by the seed and by the source's content."""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Final

import xxhash

from evergrad_manifest.errors import ConfigurationError, Problem
from evergrad_trainer.data.batch import Rows, Source
from evergrad_trainer.data.order import Permutation

_CHOICE: Final = 1
"""Takes the place of an epoch in the key, which held-out documents have at 0."""


class Chosen:
    """The items of a source at the first ``count`` places of a permutation of its own, always the same."""

    def __init__(self, source: Source, count: int, *, seed: int) -> None:
        self._source = source
        self._count = count
        self.fill: Mapping[str, int] = source.fill
        self.fingerprint = xxhash.xxh3_128_hexdigest(
            f"{source.fingerprint} {count} {seed}".encode()
        )
        # By the content: neither a source's name nor the sources beside it decide what is chosen of it.
        key = xxhash.xxh64_intdigest(source.fingerprint.encode())
        self._place = Permutation(seed=seed, source=key, epoch=_CHOICE, size=len(source))

    def __len__(self) -> int:
        return self._count

    def read(self, items: Sequence[int]) -> Rows:
        """Read the items of these numbers. Raises IndexError, and whatever the source raises."""
        return self._source.read([self._place(self._checked(item)) for item in items])

    def describe(self, item: int) -> str:
        """Name the place that the item comes from."""
        return self._source.describe(self._place(self._checked(item)))

    def _checked(self, item: int) -> int:
        # The permutation continues behind the last chosen one.
        if not 0 <= item < self._count:
            raise IndexError(f"{item} is outside of {self._count} chosen samples")
        return item


def choose_samples(
    source: Source, samples: float | None, *, seed: int, field: str
) -> Source:
    """``source``, or the part of it that ``samples`` names: a count, or a share of it (a float).

    ``field``: its place in the file. Raises ConfigurationError if the source has fewer.
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
        raise ConfigurationError(Problem(field, what, "each is there once", remedy))
    return Chosen(source, count, seed=seed)
