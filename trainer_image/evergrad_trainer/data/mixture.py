"""The mixture: stream position → (source, running index) → (epoch, window), by index alone and
without state."""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evergrad_manifest.errors import ConfigurationError, Problem, raise_if
from evergrad_trainer.data.order import ItemOrders, SampleId
from evergrad_trainer.data.start_positions import SourcePosition

PERIOD: Final = 65536
"""Positions after which the pattern of sources repeats; weights are rounded to 1/65536."""


def quantise_weights(weights: Sequence[float], *, fields: Sequence[str] = ()) -> list[int]:
    """Round weights to shares of ``PERIOD`` by largest remainder: each within 1 of its exact share, their sum
    exact.

    ``fields``: the weights' places in the file; without them they are those of ``data.sources``. Raises
    ConfigurationError for a weight so small that its share would be 0.
    """
    # Fractions: rounding of floats must not decide who gets the last position.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    wanted = [weight * PERIOD / total for weight in exact]
    shares = [math.floor(share) for share in wanted]
    # Ties go by the source's number: the same shares on every machine.
    by_remainder = sorted(
        range(len(shares)), key=lambda source: (shares[source] - wanted[source], source)
    )
    for source in by_remainder[: PERIOD - sum(shares)]:
        shares[source] += 1

    problems = []
    for source, share in enumerate(shares):
        if share > 0:
            continue
        least = float((total - exact[source]) / (PERIOD - 1))
        # Up to two significant digits, so that the printed number is certainly enough.
        unit = 10.0 ** (math.floor(math.log10(least)) - 1)
        enough = math.ceil(least / unit) * unit
        problems.append(
            Problem(
                fields[source]
                if fields
                else f"spec.training.data.sources[{source}].weight",
                f"{weights[source]:g} is too small a share of all weights",
                f"shares are rounded to 1/{PERIOD} and this one becomes 0",
                f"Raise it to at least {enough:g}, or remove the source",
            )
        )
    raise_if(problems, ConfigurationError)
    return shares


@lru_cache(maxsize=16)
def _order_of_sources(shares: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """The source at each position of a period, so that every prefix is within 1 of every source's share.

    Pick j of source k may not come before, nor after, the position at which k would be off by 1 - 1/(2K-2);
    the earliest deadline goes first. Such a schedule always exists: R. Tijdeman, "The chairman assignment
    problem" (1980). Plain even spacing, picks at (j + 1/2)/share, does not keep this: sources of equal share
    would come in one burst.
    """
    count = len(shares)
    scale = 2 * count - 2
    arrivals: list[list[int]] = [[] for _ in range(PERIOD + 1)]
    for source, share in enumerate(shares):
        picks = np.arange(share, dtype=np.int64)
        release = -(-(picks * scale + 1) * PERIOD // (share * scale))
        deadline = ((picks + 1) * scale - 1) * PERIOD // (share * scale)
        # One number holds both: keys are in the order of deadlines, then of sources.
        keys = deadline * count + source
        for position, key in zip(release.tolist(), keys.tolist(), strict=True):
            arrivals[position].append(key)

    # Earliest deadline first, among the picks that may come by now.
    order = np.empty(PERIOD, dtype=np.int64)
    waiting: list[int] = []
    for position in range(1, PERIOD + 1):
        for key in arrivals[position]:
            heapq.heappush(waiting, key)
        first = heapq.heappop(waiting)
        order[position - 1] = first % count
    return order


class Mixture:
    """The sample at each position of the endless stream. Every source repeats in epochs, each newly
    permuted.

    ``sizes`` are windows a source (at least 1), ``weights`` relative shares. A source's epoch ends inside a
    step where it must: the next position of that source is the first of its next epoch. ``places``: as in
    ``ItemOrders``.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        weights: Sequence[float],
        seed: int,
        places: Sequence[SourcePosition] = (),
    ) -> None:
        self.sizes = tuple(sizes)
        if min(self.sizes) < 1:
            raise ValueError("every source of a mixture has at least one window")
        self._orders = ItemOrders(self.sizes, seed=seed, places=places)
        self.shares = tuple(quantise_weights(weights))
        # The theorem behind the order of sources is about two of them or more.
        order = np.zeros(PERIOD, dtype=np.int64)
        if len(self.sizes) > 1:
            order = _order_of_sources(self.shares)

        # Two tables of a period: which source a position has, and the how many-th of that source it is.
        self._positions = [
            np.flatnonzero(order == source) for source in range(len(self.sizes))
        ]
        self._source_at = order.astype(np.uint64)
        self._rank_at = np.empty(PERIOD, dtype=np.uint64)
        for positions in self._positions:
            self._rank_at[positions] = np.arange(positions.size, dtype=np.uint64)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that decide the order besides sizes and seed, as JSON values."""
        return {"shares": self.shares}

    def locate(self, position: int) -> SampleId:
        """The sample at ``position`` (0-based)."""
        # Plain integers: for the few positions of a slot this is several times quicker than arrays.
        period, within = divmod(position, PERIOD)
        source = int(self._source_at[within])
        return self._orders.item(
            source, period * self.shares[source] + int(self._rank_at[within])
        )

    def cursor(self, position: int) -> list[int]:
        """Samples each source has given before ``position``, with those before the stream: its next running
        index. In closed form."""
        periods, within = divmod(position, PERIOD)
        return [
            taken + periods * share + int(np.searchsorted(positions, within))
            for taken, share, positions in zip(
                self._orders.taken, self.shares, self._positions, strict=True
            )
        ]
