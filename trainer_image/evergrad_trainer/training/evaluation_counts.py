"""Counts of an evaluation of one set so far: exact sums that an interrupted evaluation continues from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Sum = Fraction | float
"""An exact sum of floats; a float once one of them was not finite."""


@dataclass
class EvaluationCounts:
    """Sums over the first ``done`` batches of a set, the same on every rank.

    Exact, so that neither the order of the batches nor the place where an evaluation was cut changes a bit of
    the means, and small, however many batches there are. ``key``: what is measured on what; a tally of
    another key counts nothing.
    """

    key: str
    names: Sequence[str] = ()
    """Names of the parts; the sums are the total's and then theirs."""
    done: int = 0
    weight: int = 0
    sums: list[Sum] = field(default_factory=list)
    seconds: float = 0.0
    """Time of this rank that it has taken, in all tries."""

    def __post_init__(self) -> None:
        if not self.sums:
            self.sums = [Fraction(0) for _ in range(1 + len(self.names))]

    def add(
        self, rows: Sequence[Sequence[float]], *, num_batches: int, weight: int
    ) -> None:
        """Count the next ``num_batches`` batches. ``rows``: for each sum its numbers, in any order."""
        for index, row in enumerate(rows):
            for value in row:
                total = self.sums[index]
                # Without rounding while both are finite.
                if isinstance(total, float):
                    self.sums[index] = total + value
                else:
                    self.sums[index] = (
                        total + Fraction(value) if math.isfinite(value) else value
                    )
        self.done += num_batches
        self.weight += weight

    def means(self) -> list[float]:
        """The mean a unit of weight of the total and of each part; nan where nothing weighs anything."""
        if not self.weight:
            return [math.nan for _ in self.sums]
        means = []
        for total in self.sums:
            # The nearest float, as ``math.fsum`` gives it of the same numbers.
            try:
                nearest = float(total)
            except OverflowError:
                nearest = math.inf if total > 0 else -math.inf
            means.append(nearest / self.weight)
        return means

    def to_json(self) -> dict[str, Any]:
        """JSON values that :meth:`from_json` reads, without rounding."""
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
        """The tally that was written, or an empty one where that was of another key."""
        if values.get("key") != key or len(values.get("sums", ())) != 1 + len(names):
            return EvaluationCounts(key, names)
        done, weight = int(values["done"]), int(values["weight"])
        sums: list[Sum] = []
        for text in values["sums"]:
            # Fraction refuses nan and inf, which only a float can be.
            try:
                sums.append(Fraction(text))
            except ValueError:
                sums.append(float(text))
        seconds = float(values["seconds"])
        return EvaluationCounts(
            key, names, done=done, weight=weight, sums=sums, seconds=seconds
        )
