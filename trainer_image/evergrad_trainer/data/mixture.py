"""The mixture, without state: stream position → (source, index in its sequence) → (epoch, window)."""

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
"""Number of positions after which the pattern of sources repeats. Weights are rounded to 1/65536."""


def quantise_weights(weights: Sequence[float], *, fields: Sequence[str] = ()) -> list[int]:
    """Round weights to integer shares of ``PERIOD`` by the largest remainder.

    Each share differs from its exact share by less than 1, and the sum is exactly ``PERIOD``. For example,
    the weights [1, 3] give the shares [16384, 49152]. ``fields``: the manifest fields of the weights, by
    default of ``data.sources``. Raises ConfigurationError if a weight is so small that its share would be 0.
    """
    # Use fractions, because rounding of floats must not determine which source gets the last position.
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    wanted = [weight * PERIOD / total for weight in exact]
    shares = [math.floor(share) for share in wanted]
    # Break ties by the number of the source, which gives the same shares on every machine.
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
        # Round up to two significant digits, so that the printed number is large enough.
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
    """Return the source at each position of a period, int64 [PERIOD].

    In every prefix, the number of positions of each source is within 1 of its exact share. For K sources,
    pick j of source k has an earliest and a latest position, at which the number would differ by
    1 - 1/(2K-2). The pick with the earliest deadline goes first. Such a schedule always exists: R. Tijdeman,
    "The chairman assignment problem" (1980). Even spacing, with picks at (j + 1/2)/share, does not have this
    property, because the picks of sources with equal shares would coincide.
    """
    count = len(shares)
    scale = 2 * count - 2
    arrivals: list[list[int]] = [[] for _ in range(PERIOD + 1)]
    for source, share in enumerate(shares):
        picks = np.arange(share, dtype=np.int64)
        release = -(-(picks * scale + 1) * PERIOD // (share * scale))
        deadline = ((picks + 1) * scale - 1) * PERIOD // (share * scale)
        # Combine deadline and source in one key, which sorts by deadline and then by source.
        keys = deadline * count + source
        for position, key in zip(release.tolist(), keys.tolist(), strict=True):
            arrivals[position].append(key)

    # Choose the earliest deadline among the picks that are allowed at this position.
    order = np.empty(PERIOD, dtype=np.int64)
    waiting: list[int] = []
    for position in range(1, PERIOD + 1):
        for key in arrivals[position]:
            heapq.heappush(waiting, key)
        first = heapq.heappop(waiting)
        order[position - 1] = first % count
    return order


class Mixture:
    """An endless stream of samples from several sources. Every source repeats, with a permutation per epoch.

    ``sizes``: number of windows per source, at least 1. ``weights``: relative shares. An epoch of a source
    may end within a step: the next position of this source is then the first position of its next epoch.
    ``places``: see ``ItemOrders``.
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
        # The schedule is defined only for two or more sources.
        order = np.zeros(PERIOD, dtype=np.int64)
        if len(self.sizes) > 1:
            order = _order_of_sources(self.shares)

        # Two tables of a period: the source at each position, and the number of its earlier positions.
        self._positions = [
            np.flatnonzero(order == source) for source in range(len(self.sizes))
        ]
        self._source_at = order.astype(np.uint64)
        self._rank_at = np.empty(PERIOD, dtype=np.uint64)
        for positions in self._positions:
            self._rank_at[positions] = np.arange(positions.size, dtype=np.uint64)

    @property
    def facts(self) -> dict[str, Any]:
        """Values that determine the order in addition to sizes and seed, as JSON values."""
        return {"shares": self.shares}

    def locate(self, position: int) -> SampleId:
        """Return the sample at ``position`` (from 0)."""
        # Plain integers are several times faster than arrays for the few positions of a slot.
        period, within = divmod(position, PERIOD)
        source = int(self._source_at[within])
        return self._orders.item(
            source, period * self.shares[source] + int(self._rank_at[within])
        )

    def cursor(self, position: int) -> list[int]:
        """Return the number of samples of each source before ``position``, including earlier runs.

        The number is the next index of the source. It is computed in closed form.
        """
        periods, within = divmod(position, PERIOD)
        return [
            taken + periods * share + int(np.searchsorted(positions, within))
            for taken, share, positions in zip(
                self._orders.taken, self.shares, self._positions, strict=True
            )
        ]
