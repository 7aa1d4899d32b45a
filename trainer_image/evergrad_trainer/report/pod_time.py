"""Time of a run's pods, as counted by its cluster. The run directory does not contain these numbers.

The operator counts how long pods live, including time in a queue and before their first process, but mounts
no volume. A report reads the numbers from the run's object, for example from the output of
``kubectl get trun NAME -o json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from evergrad_common.causes import USEFUL, USES
from evergrad_common.text import duration, percent
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.report.figures import as_mapping
from evergrad_trainer.report.tables import Table, build_table

_UNITS: Final = {
    "podHours": "pod-hours",
    "gpuHours": "GPU-hours",
    "waste": "waste",
    "cost": "",
}

_NOTE: Final = "Counted by the cluster, from the creation of each pod to its end."


@dataclass(frozen=True)
class PodTime:
    """Time of a run's pods. ``summary``: its sums as texts. ``raw``: as in the status."""

    summary: str
    table: Table
    raw: Mapping[str, Any]


def read_pod_time(text: str, *, source: str, run: str | None) -> PodTime:
    """Read ``status.usage`` of a TrainingRun, as JSON or YAML.

    ``source``: origin of ``text``, for messages. ``run``: name of the run in the report, if known.

    Raises RunDirectoryError if ``text`` is not a TrainingRun, is another run, or has no usage.
    """
    usage = _read_usage(text, source=source, run=run)
    seconds = {
        use: amount
        for use, amount in as_mapping(usage.get("byCause")).items()
        if use in USES and isinstance(amount, int) and amount >= 0
    }
    total = sum(seconds.values())
    if not total:
        raise RunDirectoryError(
            Problem(
                source,
                "its status has no usage",
                "no operator has counted its pods yet",
                "Ask again once a pod of it has run",
            )
        )

    sums = [
        f"{usage[key]} {unit}".rstrip() for key, unit in _UNITS.items() if usage.get(key)
    ]
    # Keep the order of the catalogue, in which time that the run requested comes first.
    rows = [
        (
            text_of_use,
            "yes" if use in USEFUL else "",
            duration(seconds[use]),
            percent(seconds[use] / total),
        )
        for use, text_of_use in USES.items()
        if seconds.get(use)
    ]
    titles = ("Spent on", "Asked for", "Time of pods", "Share")
    table = build_table(titles, rows, numeric=titles[2:])
    return PodTime(f"{', '.join(sums)}. {_NOTE}", table, dict(usage))


def _read_usage(text: str, *, source: str, run: str | None) -> Mapping[str, Any]:
    """Return ``status.usage``, or an empty mapping. Raises RunDirectoryError if ``text`` is not this run."""
    remedy = "Write it with: kubectl get trun NAME -o json"
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problem = Problem(source, "is neither JSON nor YAML", remedy=remedy)
        raise RunDirectoryError(problem) from error
    if not isinstance(value, Mapping) or value.get("kind") != "TrainingRun":
        raise RunDirectoryError(Problem(source, "is not one TrainingRun", remedy=remedy))

    # Refuse the object of another run: a reader would not notice wrong costs.
    name = as_mapping(value.get("metadata")).get("name")
    if run is not None and name != run:
        what = f"is run {name}, and the report is on {run}"
        raise RunDirectoryError(Problem(source, what, remedy=remedy))
    return as_mapping(as_mapping(value.get("status")).get("usage"))
