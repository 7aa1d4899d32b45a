"""Parses and builds the state of a run's data preparation, from the pod's report and for the run's status.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Final

from evergrad_common.contract import PREPARING
from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import get_map
from evergrad_operator.core.objects.status_codec import At, Layout, decode
from evergrad_operator.core.objects.status_kinds import (
    FLAG,
    NATURAL,
    TEXT,
    natural,
    short_text,
)

_NAME: Final = short_text(128)
DONE: Final = "done"
"""Value of ``work`` for a preparation that is complete."""


@dataclass(frozen=True)
class DataPreparation:
    """The newest preparation pod and its last reported progress.

    ``attempt``: attempt of the pod, or -1. ``is_recorded``: the pod's end is counted. ``prepared``: hash of
    the settings for which the data are prepared; empty if they are not prepared. ``work``: scan, tokenize,
    split, wait or done. ``bytes_done``, ``bytes_total``: bytes of source files.
    """

    LAYOUT: ClassVar[Layout] = Layout(
        needs={"memory.preparation": ("attempt", "prepared"), "preparation": ("work",)},
        derived={"preparation.percent": "percent"},
    )
    attempt: Annotated[
        int, At("memory.preparation.attempt", natural(MAX_ATTEMPT), always=True)
    ] = -1
    is_recorded: Annotated[bool, At("memory.preparation.ended", FLAG, always=True)] = False
    prepared: Annotated[str, At("memory.preparation.prepared", TEXT, always=True)] = ""
    work: Annotated[str, At("preparation.work", _NAME)] = ""
    source: Annotated[str, At("preparation.source", _NAME)] = ""
    bytes_done: Annotated[int, At("preparation.bytesDone", NATURAL, always=True)] = 0
    bytes_total: Annotated[int, At("preparation.bytesTotal", NATURAL, always=True)] = 0
    documents: Annotated[int, At("preparation.documents", NATURAL, always=True)] = 0
    tokens: Annotated[int, At("preparation.tokens", NATURAL, always=True)] = 0

    @property
    def share(self) -> float:
        """Share of the present work that is done, 0 to 1."""
        if self.work == DONE:
            return 1.0
        return min(1.0, self.bytes_done / self.bytes_total) if self.bytes_total else 0.0

    @property
    def percent(self) -> int | None:
        """``share`` in percent, rounded down; None if the number of bytes is not known."""
        if self.work == DONE:
            return 100
        total = self.bytes_total
        return min(100, 100 * self.bytes_done // total) if total else None


@dataclass(frozen=True)
class PreparationReport:
    """The report of the preparation pod of ``attempt``. ``values``: the values that ``evergrad prepare``
    reports."""

    attempt: int
    values: Mapping[str, Any]


def find_report(raw: Mapping[str, Any], *, attempt: int) -> PreparationReport | None:
    """Return the report in a response to ``GET /status``; None if it does not come from a preparation."""
    is_preparation = raw.get("phase") == PREPARING
    return (
        PreparationReport(attempt, get_map(raw, "preparation")) if is_preparation else None
    )


def take_report(known: DataPreparation, values: Mapping[str, Any]) -> DataPreparation:
    """Return the preparation, updated with the ``values`` of a report.

    They are read as the values in a status are, with the same limits: another program may use the port.
    """
    if not values:
        return known
    reported = decode(DataPreparation, {"preparation": values})
    return replace(
        reported,
        attempt=known.attempt,
        is_recorded=known.is_recorded,
        prepared=known.prepared,
    )
