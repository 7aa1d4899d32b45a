"""Where the data of a run begin: each source at its first item, or where an earlier run has left it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

DATA_START: Final = "dataStart"
"""Key of ``run.json`` under which stands where the data of the run begin."""


@dataclass(frozen=True)
class Place:
    """The order of a source's items, and how far into it a run begins.

    ``fingerprint``: of the items, which say which source it is. ``number``: what its permutations are keyed
    by. ``taken``: items that it gave before, in all its passes.
    """

    name: str
    fingerprint: str
    number: int
    taken: int = 0


@dataclass(frozen=True)
class DataStart:
    """Where the data of a run begin, with the step behind which that is.

    ``sources``: those of the mixture, in its order. ``left_out``: those that earlier runs had and this one
    has not, which go on where a later run has them again. ``data_before``: the fingerprint of the data of the
    run whose position this is; empty for a run that begins at its first step.
    """

    sources: tuple[Place, ...]
    after_step: int = 0
    left_out: tuple[Place, ...] = ()
    data_before: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it is the position of another run."""
        return bool(self.data_before)

    def go_on(
        self, step: int, *, cursor: Mapping[str, int], data_fingerprint: str
    ) -> "DataStart":
        """Where a run begins that takes over behind ``step`` of this one.

        ``cursor``: items that each source has given by then, by name. Raises ValueError if it is that of
        other sources.
        """
        if {one.name for one in self.sources} != cursor.keys():
            raise ValueError(f"the cursor has the sources {', '.join(cursor)}")
        return DataStart(
            tuple(replace(one, taken=cursor[one.name]) for one in self.sources),
            after_step=step,
            left_out=self.left_out,
            data_before=data_fingerprint,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values, as ``run.json`` has them."""
        value: dict[str, Any] = {
            "afterStep": self.after_step,
            "sources": [asdict(one) for one in self.sources],
        }
        if self.goes_on:
            value["leftOut"] = [asdict(one) for one in self.left_out]
            value["dataBefore"] = self.data_before
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> "DataStart":
        """The inverse of ``to_json``."""
        return DataStart(
            tuple(Place(**one) for one in value["sources"]),
            after_step=int(value["afterStep"]),
            left_out=tuple(Place(**one) for one in value.get("leftOut", ())),
            data_before=str(value.get("dataBefore", "")),
        )


def place_sources(start: DataStart | None, sources: Sequence[tuple[str, str]]) -> DataStart:
    """``start`` for a mixture of ``sources``, given by name and fingerprint: without one, all at their first
    item.

    A source with the items of one in ``start`` goes on there, whatever it is called. The others begin at
    their first item, each with a number of its own, so that no order is that of another source.
    """
    if start is None:
        return DataStart(
            tuple(Place(name, items, number) for number, (name, items) in enumerate(sources))
        )

    # Several sources may have the same items: the one that kept its name goes on as itself.
    earlier = [*start.sources, *start.left_out]
    numbers = itertools.count(max((one.number for one in earlier), default=-1) + 1)
    found: dict[int, Place] = {}
    for has_same_name in (True, False):
        for index, (name, items) in enumerate(sources):
            fits = [
                one
                for one in earlier
                if one.fingerprint == items and (one.name == name or not has_same_name)
            ]
            if fits and index not in found:
                found[index] = fits[0]
                earlier.remove(fits[0])
    placed = tuple(
        replace(found[index], name=name)
        if index in found
        else Place(name, items, next(numbers))
        for index, (name, items) in enumerate(sources)
    )
    return replace(start, sources=placed, left_out=tuple(earlier))
