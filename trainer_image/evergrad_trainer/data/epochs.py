"""A mixture by counts: each epoch has exactly so many samples of each source, spread evenly over it; and the
position at which sources are exhausted.

Closed forms of whole numbers, without a table: any position and any cursor in O(log sources).
"""

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any, Literal, Protocol

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_trainer.data.order import ItemOrders, SampleId
from evergrad_trainer.data.start_positions import SourcePosition


class Order(Protocol):
    """The sample at each position of an endless stream over some sources."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source."""

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that decide the order besides sizes and seed, as JSON values."""

    def locate(self, position: int) -> SampleId:
        """The sample at ``position`` (0-based)."""

    def cursor(self, position: int) -> list[int]:
        """Samples each source has given before ``position``, with those before the stream."""


def count_passes(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Samples an epoch of each source: its size times its passes, rounded to whole samples.

    Raises ConfigurationError for passes so few that they are no sample.
    """
    # Through the shortest decimal: 0.1 passes over 30 samples are 3.
    counts = [
        int(size * Fraction(repr(float(weight))) + Fraction(1, 2))
        for size, weight in zip(sizes, weights, strict=True)
    ]
    problems = [
        Problem(
            f"spec.training.data.sources[{source}].weight",
            f"{weights[source]:g} passes over {sizes[source]} samples are none",
            "with `mixing: passes` a weight is the number of passes an epoch",
            f"Raise it to at least {1 / sizes[source]:.2g}, or remove the source",
        )
        for source, count in enumerate(counts)
        if count < 1
    ]
    raise_if(problems, ConfigurationError)
    return counts


class PassMixture:
    """An endless stream of epochs with ``counts[k]`` samples of source k each.

    The sources are halved again and again: of the first q places of a group of t, of which n are those of its
    first half, that half has (q·n + ⌊t/2⌋) div t. Thus it is never more than half a place off its share, and
    has exactly n of all t. A source goes on where it stood in the epoch before, through its own passes, each
    newly permuted as in ``Mixture``. ``places``: as in ``ItemOrders``.
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
        """Samples an epoch."""
        self._before = [0, *accumulate(counts)]
        self._orders = ItemOrders(self.sizes, seed=seed, places=places)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that decide the order besides sizes and seed, as JSON values."""
        return {"counts": self.counts}

    def locate(self, position: int) -> SampleId:
        """The sample at ``position`` (0-based)."""
        epochs, place = divmod(position, self.epoch)
        low, high = 0, len(self.counts)
        while high - low > 1:
            middle = (low + high) // 2
            given = self._given(low, middle, high, place)
            if self._given(low, middle, high, place + 1) > given:
                high, place = middle, given
            else:
                low, place = middle, place - given

        # ``low`` is the source, and ``place`` how many of its samples this epoch came before.
        return self._orders.item(low, epochs * self.counts[low] + place)

    def cursor(self, position: int) -> list[int]:
        """Samples each source has given before ``position``, with those before the stream: its next running
        index. In closed form."""
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
        """How many of the first ``places`` of the sources [low, high) are those of [low, middle)."""
        first = self._before[middle] - self._before[low]
        whole = self._before[high] - self._before[low]
        return (places * first + whole // 2) // whole


def exhausted_after(order: Order, epochs: Fraction, which: Literal["first", "all"]) -> int:
    """Positions after which the first source, or the last of all, has given ``epochs`` times its samples.

    What it gave before the stream counts.
    """
    ends = []
    for source, size in enumerate(order.sizes):
        wanted = -(-size * epochs.numerator // epochs.denominator)
        if order.cursor(0)[source] >= wanted:
            # It had given them before the stream began.
            ends.append(0)
            continue
        # Counts never fall with the position, so that the first position with enough is found by halving.
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
