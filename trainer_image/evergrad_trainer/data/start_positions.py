"""Start positions of a run's data: the first item of each source, or the position after an earlier run."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import BaseModel, Field, NonNegativeInt

DATA_START: Final = "dataStart"
"""Key in ``run.json`` for the start position of the run's data."""


@dataclass(frozen=True)
class SourcePosition:
    """The order of a source's items, and the position in that order at which a run starts.

    ``fingerprint``: fingerprint of the items, which identifies the source. ``number``: the key of its
    permutations. ``taken``: number of items used before, over all epochs. ``content``: hash of the files that
    the items are cut from; empty if it is unknown.
    """

    name: str
    fingerprint: str
    number: int
    taken: int = 0
    content: str = ""


class PlaceRecord(BaseModel):
    """A source position in ``run.json``."""

    name: str
    fingerprint: str
    number: NonNegativeInt
    taken: NonNegativeInt


class StartRecord(BaseModel):
    """A ``DataStart`` in ``run.json``. The last three keys are present only if it continues another run.

    ``content``: hashes of files, keyed by the fingerprints of the items that are cut from them. The hashes
    are not part of the source records, because older versions accept no further keys in these records.
    """

    after_step: NonNegativeInt = Field(alias="afterStep")
    sources: tuple[PlaceRecord, ...]
    left_out: tuple[PlaceRecord, ...] | None = Field(default=None, alias="leftOut")
    data_before: str | None = Field(default=None, alias="dataBefore")
    content: Mapping[str, str] = {}


@dataclass(frozen=True)
class DataStart:
    """The start position of a run's data, and the step after which it applies.

    ``sources``: positions of the sources of the mixture, in its order. ``left_out``: positions of sources
    that earlier runs used and this run does not use; a later run that uses such a source continues there.
    ``data_before``: the fingerprint of the data of the earlier run; empty if the run starts from the
    beginning.
    """

    sources: tuple[SourcePosition, ...]
    after_step: int = 0
    left_out: tuple[SourcePosition, ...] = ()
    data_before: str = ""

    @property
    def goes_on(self) -> bool:
        """Whether the data continue from the position of another run."""
        return bool(self.data_before)

    def go_on(
        self,
        step: int,
        *,
        cursor: Mapping[str, int],
        data_fingerprint: str,
        contents: Mapping[str, str] | None = None,
    ) -> "DataStart":
        """Return the start position of a run that continues after ``step`` of this run.

        ``cursor``: number of items used from each source up to then, by name. ``contents``: hashes of their
        files, if known. Raises ValueError if the names in ``cursor`` are not the names of these sources.
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
        """Return the start position as JSON values for ``run.json``."""
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
        """Build a start position from a validated record. The inverse of ``to_json``."""
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
    """Return the start position for a mixture of ``sources``, given as pairs of name and fingerprint.

    If ``start`` is None, every source starts at its first item. Otherwise, a source with the same items as a
    source in ``start`` continues there, even if its name changed. The other sources start at their first
    item, each with a new number, so that no two sources share an order.
    """
    if start is None:
        return DataStart(
            tuple(
                SourcePosition(name, items, number)
                for number, (name, items) in enumerate(sources)
            )
        )

    # Several sources may have the same items, so match by name first and by items alone second.
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
