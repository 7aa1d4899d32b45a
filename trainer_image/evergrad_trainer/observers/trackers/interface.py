"""The interface of a tracker's library, and the description of the run that it receives."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Protocol

from evergrad_manifest.training import Tracker

CLOSING_SECONDS: Final = 5.0
"""Maximum time that the end of a run waits for all trackers together. The program that stopped the run may
kill it next."""

Values = Mapping[str, float]
"""Finite numbers by their names in a tracker, such as ``train/loss``."""
End = Literal["complete", "stopped", "interrupted", "failed", "handed on"]
"""How this process's part of the run ends. ``stopped``: after a step whose evaluations are complete.
``interrupted``: an evaluation of the newest step may be incomplete, and continues when the run does. The same
holds after ``failed`` and ``handed on``, where another process continues."""


@dataclass(frozen=True)
class Shown:
    """The records that a tracker already shows; they are not written again.

    ``step``: the newest step. ``evaluations``: the newest step of each evaluation set; ``others``: the newest
    step of all other sets.
    """

    step: int = 0
    evaluations: Mapping[str, int] = field(default_factory=dict)
    others: int = -1

    def has_evaluation(self, name: str, step: int) -> bool:
        return step <= self.evaluations.get(name, self.others)


@dataclass(frozen=True)
class TrackedRun:
    """The description of a run for its tracker, at a start or when another process becomes rank 0.

    ``start_step``: number of finished steps; the tracker may show later steps from before a kill. ``own_id``:
    the id that the library gave the run, or an empty text if the tracker does not show the run yet.
    ``noted``: the shown records according to the run's note; some libraries can report them more exactly.
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
    """One tracker's library, opened for one run. One thread calls it; an exception ends the tracker."""

    own_id: str
    shown: Shown
    """The records that the tracker shows when it is opened."""

    def write(self, step: int, time: float, values: Values) -> None:
        """Show values at ``step``. Steps never decrease; ``time`` is in Unix seconds."""

    def note(self, name: str, text: str) -> None:
        """Store a text next to the values. The same note may be written again."""

    def flush(self) -> None:
        """Store all written values so that they survive a kill of this process."""

    def finish(self, end: End) -> None:
        """Flush and close the run."""


def flatten(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings to dotted names, for libraries that do not support nesting. Lists stay whole.

    For example, ``{"a": {"b": 1}}`` becomes ``{"a.b": 1}``.
    """
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = value
    return flat
