"""The interface of a tracker's library, and what it is told of the run that it shows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from evergrad_manifest.training import Tracker

CLOSING_SECONDS: Final = 5.0
"""How long an end waits for all trackers together: whoever asked the run to stop may kill next."""

Values = Mapping[str, float]
"""Finite numbers by the names that a tracker shows, such as ``train/loss``."""
End = Literal["complete", "stopped", "interrupted", "failed", "handed on"]
"""How this process's part ends. ``stopped``: after a step of which everything is known. ``interrupted``: an
evaluation of the newest step may have been cut, and goes on with the run; as it may after ``failed`` and
``handed on``, where another process goes on."""


@dataclass(frozen=True)
class Shown:
    """Records that a tracker shows already, and is not given again.

    ``step``: the newest one. ``evaluations``: the newest step of each evaluation set; ``others``: of sets
    that are not among them.
    """

    step: int = 0
    evaluations: Mapping[str, int] = field(default_factory=dict)
    others: int = -1

    def has_evaluation(self, name: str, step: int) -> bool:
        return step <= self.evaluations.get(name, self.others)


@dataclass(frozen=True)
class TrackedRun:
    """A run as its tracker gets to know it, at a start or where another process becomes rank 0.

    ``start_step``: finished steps now; the tracker may have been shown more before a kill. ``own_id``: the
    id that the library itself has given the run, empty where it has not been shown yet. ``noted``: what this
    product has noted of what is shown; some libraries can say it better themselves.
    """

    run_id: str
    name: str
    settings: Tracker
    directory: Path
    facts: Mapping[str, Any]
    start_step: int
    own_id: str
    noted: Shown

    @property
    def title(self) -> str:
        return self.settings.name or self.name


class Library(Protocol):
    """One tracker's library, opened for one run. Called by one thread; an exception ends the tracker."""

    own_id: str
    shown: Shown
    """Records that are shown now that it is opened."""

    def write(self, step: int, time: float, values: Values) -> None:
        """Show values at ``step``. Steps never go back; ``time`` in Unix seconds."""

    def note(self, name: str, text: str) -> None:
        """Keep a text beside the values. The same one may be given again."""

    def flush(self) -> None:
        """Bring what was written to where a kill of this process does not reach it."""

    def finish(self, end: End) -> None:
        """Flush and let go of the run."""


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one of dotted names, for libraries that know no others. Lists stay whole."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
