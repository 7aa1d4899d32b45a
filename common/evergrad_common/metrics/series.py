"""One metric of an endpoint, as data."""

from dataclasses import dataclass
from typing import Final, Literal

PREFIX: Final = "evergrad_"
Kind = Literal["gauge", "counter", "histogram"]
Aggregate = Literal["newest", "sum", "max", "none"]
"""How the values of several endpoints become one: take the endpoint whose value is the newest, add, take the
largest; ``none``: they are not put together."""


@dataclass(frozen=True)
class Series:
    """One metric of an endpoint.

    ``aggregate``: of a gauge; counters and histograms are always added. ``labels``: besides those that every
    metric of its endpoint has. ``note``: more for the reference page.
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
        """Its name in the endpoint's text."""
        return PREFIX + self.name

    @property
    def over_several(self) -> Aggregate:
        """How the values of several endpoints become one."""
        return self.aggregate if self.kind == "gauge" else "sum"
