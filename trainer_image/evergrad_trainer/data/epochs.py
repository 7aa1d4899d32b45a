"""A mixture by counts, and the positions at which sources are exhausted.

Each epoch has an exact number of samples of each source, spread evenly over the epoch. Samples are computed
in closed form with integers, without tables: a position takes O(log sources).
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, Protocol

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_trainer.data.order import ItemOrders, SampleId
from evergrad_trainer.data.start_positions import SourcePosition


class Order(Protocol):
    """An endless stream of samples over some sources, with random access by position."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of samples of each source."""

    @property
    def facts(self) -> dict[str, Any]:
        """Values that determine the order in addition to sizes and seed, as JSON values."""

    def locate(self, position: int) -> SampleId:
        """Return the sample at ``position`` (from 0)."""

    def cursor(self, position: int) -> list[int]:
        """Return the number of samples of each source before ``position``, including earlier runs."""


def count_passes(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Return the samples per epoch of each source: its size times its weight, rounded to whole samples.

    ``weights``: passes over each source per epoch. For example, 0.1 passes over 30 samples are 3 samples.
    Raises ConfigurationError if the result is 0 for a source.
    """
    # Convert weights by their shortest decimal form, because the float 0.1 is not exactly 1/10.
    counts = [
        int(size * Fraction(repr(float(weight))) + Fraction(1, 2))
        for size, weight in zip(sizes, weights, strict=True)
    ]
    problems = [
        Problem(
            f"spec.training.data.sources[{source}].weight",
            f"{weights[source]:g} passes over {sizes[source]} samples give no sample",
            "with `mixing: passes` a weight is the number of passes an epoch",
            f"Raise it to at least {1 / sizes[source]:.2g}, or remove the source",
        )
        for source, count in enumerate(counts)
        if count < 1
    ]
    raise_if(problems, ConfigurationError)
    return counts


class PassMixture:
    """An endless stream of epochs. Each epoch has ``counts[k]`` samples of source k.

    The list of sources is bisected recursively. If a group has t samples, n of them in its first half, then
    the first q positions of the group contain (q·n + ⌊t/2⌋) div t samples of the first half. So the number
    never differs from the exact share by more than half a sample, and is exactly n after t positions. In the
    next epoch, a source continues after its last sample. Each pass over a source has a new permutation, as in
    ``Mixture``. ``places``: see ``ItemOrders``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        counts: Sequence[int],
        seed: int,
        places: Sequence[SourcePosition] = (),
    ) -> None:
        if min(sizes) < 1 or min(counts) < 1:
            raise ValueError(
                "every source of a mixture has at least one window, and gives one"
            )
        self.sizes = tuple(sizes)
        self.counts = tuple(counts)
        self.epoch = sum(counts)
        """Number of samples per epoch."""
        self._before = [0, *accumulate(counts)]
        self._orders = ItemOrders(self.sizes, seed=seed, places=places)

    @property
    def facts(self) -> dict[str, Any]:
        """Values that determine the order in addition to sizes and seed, as JSON values."""
        return {"counts": self.counts}

    def locate(self, position: int) -> SampleId:
        """Return the sample at ``position`` (from 0)."""
        epochs, place = divmod(position, self.epoch)
        low, high = 0, len(self.counts)
        while high - low > 1:
            middle = (low + high) // 2
            given = self._given(low, middle, high, place)
            if self._given(low, middle, high, place + 1) > given:
                high, place = middle, given
            else:
                low, place = middle, place - given

        # ``low`` is the source, and ``place`` is the number of its earlier samples in this epoch.
        return self._orders.item(low, epochs * self.counts[low] + place)

    def cursor(self, position: int) -> list[int]:
        """Return the number of samples of each source before ``position``, including earlier runs.

        The number is the next index of the source. It is computed in closed form.
        """
        epochs, place = divmod(position, self.epoch)
        found = [
            taken + epochs * count
            for taken, count in zip(self._orders.taken, self.counts, strict=True)
        ]
        groups = [(0, len(found), place)]
        while groups:
            low, high, places = groups.pop()
            if high - low == 1:
                found[low] += places
                continue
            middle = (low + high) // 2
            given = self._given(low, middle, high, places)
            groups += [(low, middle, given), (middle, high, places - given)]
        return found

    def _given(self, low: int, middle: int, high: int, places: int) -> int:
        """Return how many of the first ``places`` samples of the sources [low, high) are of [low, middle)."""
        first = self._before[middle] - self._before[low]
        whole = self._before[high] - self._before[low]
        return (places * first + whole // 2) // whole


def exhausted_after(order: Order, epochs: Fraction, which: Literal["first", "all"]) -> int:
    """Return the number of positions after which a source has been used for ``epochs`` epochs.

    ``which``: whether the first source or all sources must have reached this number of epochs. Samples that
    earlier runs used count.
    """
    ends = []
    for source, size in enumerate(order.sizes):
        wanted = -(-size * epochs.numerator // epochs.denominator)
        if order.cursor(0)[source] >= wanted:
            # Earlier runs have already used this number of samples.
            ends.append(0)
            continue
        # Bisect for the first position with enough samples, because counts never decrease.
        low, high = 0, wanted
        while order.cursor(high)[source] < wanted:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if order.cursor(middle)[source] < wanted:
                low = middle
            else:
                high = middle
        ends.append(high)
    return min(ends) if which == "first" else max(ends)
