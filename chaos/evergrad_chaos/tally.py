"""Counts the events of a disturbed run, and describes them in one line."""

import contextlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ChaosTally:
    """Counts of a disturbed run; the sums include all processes of the coordinator."""

    num_events: int = 0
    generation: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    lost_seconds: dict[str, float] = field(default_factory=dict)
    lost_before: dict[str, float] = field(default_factory=dict)
    """Lost seconds, by cause, that earlier processes of the coordinator reported."""
    longest_seconds: float = 0.0

    def note_status(self, status: dict[str, Any]) -> None:
        """Record the generation and the lost seconds of the running coordinator's status."""
        self.generation = max(self.generation, int(status["generation"]))
        self.lost_seconds = dict(status["lostSeconds"])

    def end_coordinator(self) -> None:
        """Keep the lost seconds of the current coordinator, because its replacement counts from zero."""
        self.lost_before, self.lost_seconds = self.total_lost(), {}

    def total_lost(self) -> dict[str, float]:
        """Return the lost seconds by cause."""
        causes = sorted({*self.lost_before, *self.lost_seconds})
        return {
            cause: self.lost_before.get(cause, 0.0) + self.lost_seconds.get(cause, 0.0)
            for cause in causes
        }


def describe_tally(tally: ChaosTally, *, repeated: int) -> str:
    """Return the summary of a disturbed run in one line."""
    kinds = ", ".join(
        f"{count} {kind.replace('_', ' ')}" for kind, count in sorted(tally.kinds.items())
    )
    lost = ", ".join(
        f"{cause.replace('_', ' ')} {seconds:.1f}"
        for cause, seconds in tally.total_lost().items()
    )
    return (
        f"chaos: {tally.num_events} events ({kinds or 'none'}), generation {tally.generation}, "
        f"steps repeated: {repeated}, "
        f"longest recovery {tally.longest_seconds:.1f} s, seconds lost by cause: {lost or 'none'}"
    )


def count_repeated(metrics: Path) -> int:
    """Return the number of rows in a run's metrics file whose step had already been finished."""
    repeated, newest = 0, -1
    with contextlib.suppress(FileNotFoundError), metrics.open(encoding="utf-8") as lines:
        for line in lines:
            step = int(json.loads(line)["step"])
            repeated += step <= newest
            newest = max(newest, step)
    return repeated
