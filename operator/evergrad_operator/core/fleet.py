"""Builds the rows of the fleet page from raw runs. Pure."""

from collections.abc import Iterable
from typing import Any, Final

from evergrad_operator.core.objects.kinds import Raw
from evergrad_operator.core.objects.raw import get_int, get_map, get_text
from evergrad_operator.core.observe.spec import is_managed_here

MOST_RUNS: Final = 500
"""Maximum number of runs on the page. Runs that have not ended come first, each group sorted by age, newest
first."""
_MOST_CHARACTERS: Final = 200
_ENDED: Final = ("Complete", "Failed", "Stopped")


def build_fleet(runs: Iterable[Raw]) -> dict[str, Any]:
    """Return the page's content: the number of runs, the number in each phase, and at most MOST_RUNS rows."""
    rows = [build_row(raw) for raw in runs]
    phases: dict[str, int] = {}
    for row in rows:
        phases[row["phase"]] = phases.get(row["phase"], 0) + 1
    rows.sort(key=lambda row: row["created"], reverse=True)
    rows.sort(key=lambda row: row["phase"] in _ENDED)
    return {
        "total": len(rows),
        "phases": dict(sorted(phases.items())),
        "runs": rows[:MOST_RUNS],
    }


def build_row(raw: Raw) -> dict[str, Any]:
    """Return one run's row."""
    metadata, status = get_map(raw, "metadata"), get_map(raw, "status")
    progress = get_map(status, "progress")
    manager = "" if is_managed_here(raw) else f"managed by {raw['spec']['managedBy']}"
    # Leave out values of unexpected types, because any version of the operator may have written the status.
    return {
        "namespace": get_text(metadata, "namespace"),
        "name": get_text(metadata, "name"),
        "created": get_text(metadata, "creationTimestamp"),
        "phase": get_text(status, "phase") or "Pending",
        "message": (get_text(status, "message") or manager)[:_MOST_CHARACTERS],
        "nodes": get_text(get_map(status, "nodes"), "summary"),
        "step": get_int(progress, "step"),
        "totalSteps": get_int(progress, "totalSteps"),
        "loss": get_text(progress, "loss"),
        "tokensPerSecond": get_text(progress, "tokensPerSecond"),
        "eta": get_text(progress, "eta"),
        "etaSeconds": get_int(progress, "etaSeconds"),
        "checkpointStep": get_int(get_map(status, "checkpoint"), "step"),
        "restarts": get_int(get_map(status, "restarts"), "total") or 0,
    }
