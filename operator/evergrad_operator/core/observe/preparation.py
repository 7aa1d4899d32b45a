"""The preparation of a run's data, as its pod reports it and as the run's status keeps it. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from evergrad_common.contract import PREPARING
from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import get_map, get_natural, get_text
from evergrad_operator.core.objects.status_encoding import pack_mapping, unpack_mapping

_LONGEST_NAME: Final = 128
DONE: Final = "done"
"""Word for the work of a preparation that is over."""


@dataclass(frozen=True)
class DataPreparation:
    """The newest pod that was made for it (-1: none so far), and how far it was when last heard.

    ``is_recorded``: its end is counted. ``prepared``: hash of what the data were prepared for, empty while
    they are not. ``work``: scan, tokenize, split, wait or done; the bytes are those of source files.
    """

    attempt: int = -1
    is_recorded: bool = False
    prepared: str = ""
    work: str = ""
    source: str = ""
    bytes_done: int = 0
    bytes_total: int = 0
    documents: int = 0
    tokens: int = 0

    @property
    def share(self) -> float:
        """Share of the present work that is done, 0 to 1."""
        if self.work == DONE:
            return 1.0
        return min(1.0, self.bytes_done / self.bytes_total) if self.bytes_total else 0.0


@dataclass(frozen=True)
class PreparationReport:
    """The answer of the preparing pod of ``attempt``. ``values``: as ``evergrad prepare`` describes them."""

    attempt: int
    values: Mapping[str, Any]


def find_report(raw: Mapping[str, Any], *, attempt: int) -> PreparationReport | None:
    """Return the report in an answer to ``GET /status``; None where no preparation answered."""
    is_preparation = raw.get("phase") == PREPARING
    return (
        PreparationReport(attempt, get_map(raw, "preparation")) if is_preparation else None
    )


def take_report(known: DataPreparation, values: Mapping[str, Any]) -> DataPreparation:
    """Return the preparation with what ``values`` say, of a report or a status.

    Numbers and texts are bounded: the port may be another program's.
    """
    if not values:
        return known
    return replace(
        known,
        work=get_text(values, "work")[:_LONGEST_NAME],
        source=get_text(values, "source")[:_LONGEST_NAME],
        bytes_done=get_natural(values, "bytesDone") or 0,
        bytes_total=get_natural(values, "bytesTotal") or 0,
        documents=get_natural(values, "documents") or 0,
        tokens=get_natural(values, "tokens") or 0,
    )


def parse_preparation(shown: Mapping[str, Any], notes: str) -> DataPreparation:
    """Return the preparation that a status has. ``notes``: what ``pack_preparation`` wrote."""
    raw = unpack_mapping(notes)
    attempt = get_natural(raw, "attempt", most=MAX_ATTEMPT)
    known = DataPreparation(
        attempt=-1 if attempt is None else attempt,
        is_recorded=raw.get("ended") is True,
        prepared=get_text(raw, "prepared"),
    )
    return take_report(known, shown)


def pack_preparation(preparation: DataPreparation) -> str:
    """Pack the parts that mean nothing to people; empty where there was no preparation."""
    if preparation.attempt < 0 and not preparation.prepared:
        return ""
    notes = {
        "attempt": preparation.attempt,
        "ended": preparation.is_recorded,
        "prepared": preparation.prepared,
    }
    return pack_mapping(notes)


def show_preparation(preparation: DataPreparation) -> dict[str, Any]:
    """Build the part of the status that people read; empty where nothing has been reported."""
    if not preparation.work:
        return {}
    total = preparation.bytes_total
    percent = min(100, 100 * preparation.bytes_done // total) if total else None
    return {
        "work": preparation.work,
        "source": preparation.source,
        "bytesDone": preparation.bytes_done,
        "bytesTotal": total,
        "percent": 100 if preparation.work == DONE else percent,
        "documents": preparation.documents,
        "tokens": preparation.tokens,
    }
