"""Where the data of a run begin: each source at its first item, or where an earlier run has left it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, Field, NonNegativeInt

DATA_START: Final = "dataStart"
"""Key of ``run.json`` under which stands where the data of the run begin."""


@dataclass(frozen=True)
class SourcePosition:
    """The order of a source's items, and how far into it a run begins.

    ``fingerprint``: of the items, which say which source it is. ``number``: what its permutations are keyed
    by. ``taken``: items that it gave before, in all its passes. ``content``: hash of the files that the items
    are cut from; empty where nobody knows it.
    """

    name: str
    fingerprint: str
    number: int
    taken: int = 0
    content: str = ""


class PlaceRecord(BaseModel):
    """A place as ``run.json`` has it."""

    name: str
    fingerprint: str
    number: NonNegativeInt
    taken: NonNegativeInt


class StartRecord(BaseModel):
    """A ``DataStart`` as ``run.json`` has it; the last three keys only where it is another run's position.

    ``content``: hashes of files by the fingerprints of the items that are cut from them. They stand apart
    from the places, where older versions expect no further key.
    """

    after_step: NonNegativeInt = Field(alias="afterStep")
    sources: tuple[PlaceRecord, ...]
    left_out: tuple[PlaceRecord, ...] | None = Field(default=None, alias="leftOut")
    data_before: str | None = Field(default=None, alias="dataBefore")
    content: Mapping[str, str] = {}


@dataclass(frozen=True)
class DataStart:
    """Where the data of a run begin, with the step behind which that is.

    ``sources``: those of the mixture, in its order. ``left_out``: those that earlier runs had and this one
    has not, which go on where a later run has them again. ``data_before``: the fingerprint of the data of the
    run whose position this is; empty for a run that begins at its first step.
    """

    sources: tuple[SourcePosition, ...]
    after_step: int = 0
    left_out: tuple[SourcePosition, ...] = ()
    data_before: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether it is the position of another run."""
        return bool(self.data_before)

    def go_on(
        self,
        step: int,
        *,
        cursor: Mapping[str, int],
        data_fingerprint: str,
        contents: Mapping[str, str] | None = None,
    ) -> "DataStart":
        """Where a run begins that takes over behind ``step`` of this one.

        ``cursor``: items that each source has given by then, by name. ``contents``: hashes of their files, as
        far as they are known. Raises ValueError if the cursor is that of other sources.
        """
        if {one.name for one in self.sources} != cursor.keys():
            raise ValueError(f"the cursor has the sources {', '.join(cursor)}")
        known = contents or {}
        return DataStart(
            tuple(
                replace(
                    one, taken=cursor[one.name], content=known.get(one.name, one.content)
                )
                for one in self.sources
            ),
            after_step=step,
            left_out=self.left_out,
            data_before=data_fingerprint,
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values, as ``run.json`` has them."""
        places = (*self.sources, *self.left_out)
        sources, left_out = (
            [
                {key: value for key, value in asdict(one).items() if key != "content"}
                for one in some
            ]
            for some in (self.sources, self.left_out)
        )
        value: dict[str, Any] = {"afterStep": self.after_step, "sources": sources}
        if self.goes_on:
            value["leftOut"] = left_out
            value["dataBefore"] = self.data_before
            value["content"] = {
                one.fingerprint: one.content for one in places if one.content
            }
        return value

    @staticmethod
    def from_record(record: StartRecord) -> "DataStart":
        """The inverse of ``to_json``, of values that were checked."""
        sources, left_out = (
            tuple(
                SourcePosition(**dict(one), content=record.content.get(one.fingerprint, ""))
                for one in some
            )
            for some in (record.sources, record.left_out or ())
        )
        return DataStart(
            sources,
            after_step=record.after_step,
            left_out=left_out,
            data_before=record.data_before or "",
        )


def place_sources(start: DataStart | None, sources: Sequence[tuple[str, str]]) -> DataStart:
    """``start`` for a mixture of ``sources``, given by name and fingerprint: without one, all at their first
    item.

    A source with the items of one in ``start`` continues there, whatever it is called. The others begin at
    their first item, each with a number of its own, so that no order is that of another source.
    """
    if start is None:
        return DataStart(
            tuple(
                SourcePosition(name, items, number)
                for number, (name, items) in enumerate(sources)
            )
        )

    # Several sources may have the same items: the one that kept its name continues as itself.
    earlier = [*start.sources, *start.left_out]
    numbers = itertools.count(max((one.number for one in earlier), default=-1) + 1)
    found: dict[int, SourcePosition] = {}
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
        else SourcePosition(name, items, next(numbers))
        for index, (name, items) in enumerate(sources)
    )
    return replace(start, sources=placed, left_out=tuple(earlier))
