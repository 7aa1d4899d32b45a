"""Parses and builds the state of a run's data preparation, from the pod's report and for the run's status.
Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from evergrad_common.contract import PREPARING
from evergrad_operator.core.objects.names import MAX_ATTEMPT
from evergrad_operator.core.objects.raw import get_map, get_natural, get_text
from evergrad_operator.core.objects.status_encoding import pack_mapping, unpack_mapping

_LONGEST_NAME: Final = 128
DONE: Final = "done"
"""Value of ``work`` for a preparation that is complete."""


@dataclass(frozen=True)
class DataPreparation:
    """The newest preparation pod and its last reported progress.

    ``attempt``: attempt of the pod, or -1. ``is_recorded``: the pod's end is counted. ``prepared``: hash of
    the settings for which the data are prepared; empty if they are not prepared. ``work``: scan, tokenize,
    split, wait or done. ``bytes_done``, ``bytes_total``: bytes of source files.
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
    """Return the preparation, updated with the ``values`` of a report or a status.

    Numbers and texts are limited, because another program may use the port.
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
    """Return the preparation in a status. ``notes``: the text from ``pack_preparation``."""
    raw = unpack_mapping(notes)
    attempt = get_natural(raw, "attempt", most=MAX_ATTEMPT)
    known = DataPreparation(
        attempt=-1 if attempt is None else attempt,
        is_recorded=raw.get("ended") is True,
        prepared=get_text(raw, "prepared"),
    )
    return take_report(known, shown)


def pack_preparation(preparation: DataPreparation) -> str:
    """Encode the fields that are only for the operator; empty if there was no preparation."""
    if preparation.attempt < 0 and not preparation.prepared:
        return ""
    notes = {
        "attempt": preparation.attempt,
        "ended": preparation.is_recorded,
        "prepared": preparation.prepared,
    }
    return pack_mapping(notes)


def show_preparation(preparation: DataPreparation) -> dict[str, Any]:
    """Build the part of the status for users; empty if nothing was reported yet."""
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
