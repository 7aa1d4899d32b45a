"""One metric of an endpoint, as data."""

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "evergrad_"
Kind = Literal["gauge", "counter", "histogram"]
Aggregate = Literal["newest", "sum", "max", "none"]
"""How the values of several endpoints become one value: take the newest value, add, or take the largest.
``none``: they are not combined."""


@dataclass(frozen=True)
class Series:
    """One metric of an endpoint.

    ``aggregate``: for a gauge; counters and histograms are always added. ``labels``: in addition to the
    labels of every metric of its endpoint. ``note``: additional text for the reference page.
    """

    name: str
    kind: Kind
    help: str
    unit: str = ""
    aggregate: Aggregate = "newest"
    labels: tuple[str, ...] = ()
    note: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> str:
        """Return its name in the endpoint's text."""
        return PREFIX + self.name

    @property
    def over_several(self) -> Aggregate:
        """Return how the values of several endpoints become one value."""
        return self.aggregate if self.kind == "gauge" else "sum"
