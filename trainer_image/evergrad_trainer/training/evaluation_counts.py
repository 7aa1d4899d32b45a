"""Exact sums of a partial evaluation of one set; an interrupted evaluation continues from them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Sum = Fraction | float
"""An exact sum of floats; a float after a summand was not finite."""


@dataclass
class EvaluationCounts:
    """Sums over the first ``done`` batches of a set, the same on every rank.

    The sums are exact, so that the means have the same bits for any order of the batches and any point of
    interruption. Their size does not grow with the number of batches. ``key``: identity of the measurement
    and its set; a tally with another key is not used.
    """

    key: str
    names: Sequence[str] = ()
    """Names of the parts. The first sum is the total; the others follow in this order."""
    done: int = 0
    weight: int = 0
    sums: list[Sum] = field(default_factory=list)
    seconds: float = 0.0
    """Seconds that this rank has spent on the evaluation, in all attempts."""

    def __post_init__(self) -> None:
        if not self.sums:
            self.sums = [Fraction(0) for _ in range(1 + len(self.names))]

    def add(
        self, rows: Sequence[Sequence[float]], *, num_batches: int, weight: int
    ) -> None:
        """Count the next ``num_batches`` batches. ``rows``: the summands of each sum, in any order."""
        for index, row in enumerate(rows):
            for value in row:
                total = self.sums[index]
                # While both are finite, the sum is not rounded.
                if isinstance(total, float):
                    self.sums[index] = total + value
                else:
                    self.sums[index] = (
                        total + Fraction(value) if math.isfinite(value) else value
                    )
        self.done += num_batches
        self.weight += weight

    def means(self) -> list[float]:
        """Return the mean per unit of weight of the total and of each part; NaN if the weight is 0."""
        if not self.weight:
            return [math.nan for _ in self.sums]
        means = []
        for total in self.sums:
            # The nearest float, equal to ``math.fsum`` of the same numbers.
            try:
                nearest = float(total)
            except OverflowError:
                nearest = math.inf if total > 0 else -math.inf
            means.append(nearest / self.weight)
        return means

    def to_json(self) -> dict[str, Any]:
        """Return JSON values that :meth:`from_json` reads without rounding."""
        return {
            "key": self.key,
            "done": self.done,
            "weight": self.weight,
            "sums": [str(one) for one in self.sums],
            "seconds": self.seconds,
        }

    @staticmethod
    def from_json(
        values: Mapping[str, Any], *, key: str, names: Sequence[str]
    ) -> "EvaluationCounts":
        """Return the tally that was written, or an empty tally if its key differs."""
        if values.get("key") != key or len(values.get("sums", ())) != 1 + len(names):
            return EvaluationCounts(key, names)
        done, weight = int(values["done"]), int(values["weight"])
        sums: list[Sum] = []
        for text in values["sums"]:
            # A Fraction cannot be NaN or infinite, so such sums are floats.
            try:
                sums.append(Fraction(text))
            except ValueError:
                sums.append(float(text))
        seconds = float(values["seconds"])
        return EvaluationCounts(
            key, names, done=done, weight=weight, sums=sums, seconds=seconds
        )
