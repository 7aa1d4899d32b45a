"""Values of a run's time accounts: its processes, restarts and changes of its world, with their seconds."""

import math
from collections import Counter
from dataclasses import dataclass

from evergrad_common.causes import LOSSES, ChangeCause

CAUSES = tuple(LOSSES)
"""Causes of lost time.

- startup: from process start to first step, minus restore, evaluation and checkpoint in this time
- restore: reading a checkpoint
- recompute: steps that were trained again later
- checkpoint: training was paused for a save
- evaluation: training was paused for an evaluation
- reconfiguration: from the last step in one world to the first step in the next world, minus evaluation and
  checkpoint in this time
- downtime: no process was running
- other: time between steps, and after the last step
"""


@dataclass(frozen=True)
class WorldChange:
    """One change of the processes that train together, without reading a checkpoint.

    ``seconds``: duration of the pause, from the last step before the change to the first step after it.
    """

    time: float
    generation: int
    step: int
    """Last finished step in the state from which training continues."""
    world_size: int | None
    from_world_size: int | None
    cause: ChangeCause
    detail: str
    """The coordinator's description of the cause."""
    seconds: float


@dataclass(frozen=True)
class ProcessAccount:
    """One process of the run, or all processes that passed the state from world to world, from one start to
    the next.

    ``seconds`` has every cause of CAUSES and ``productive``; their sum is the elapsed time of this part.
    ``world_size``: the world size at its start.
    """

    generation: int
    begin: float
    end: float
    pid: int | None
    world_size: int | None
    resumed_from: int | None
    num_steps: int
    last_step: int | None
    ended: str
    """``running or killed`` if the last process has no end event; otherwise a cause of Restart or
    ``complete``."""
    detail: str
    seconds: dict[str, float]
    changes: tuple[WorldChange, ...] = ()

    @property
    def mean_world_size(self) -> float:
        """Average number of processes over time; 1 if the number is unknown."""
        size, since, area = self.world_size or 1, self.begin, 0.0
        for change in self.changes:
            # Clocks of two machines may differ, so clip negative intervals to 0.
            at = min(max(change.time, since), self.end)
            area += size * (at - since)
            size, since = change.world_size or size, at
        area += size * (self.end - since)
        return area / (self.end - self.begin) if self.end > self.begin else float(size)


@dataclass(frozen=True)
class Restart:
    """One restart of the run.

    ``cause``: signal, stop_file, stop_after_steps, after_step, complete (extended), failed or killed.
    """

    cause: str
    detail: str
    time: float
    generation: int
    resumed_from: int | None
    downtime_seconds: float
    repeated_steps: int
    """Number of finished steps of the previous process that were lost."""


@dataclass(frozen=True)
class Goodput:
    """The accounts of a run; all its times in seconds."""

    productive_seconds: float
    lost_seconds: dict[str, float]
    """Every cause of CAUSES; none is negative."""
    processes: tuple[ProcessAccount, ...]
    restarts: tuple[Restart, ...]
    notes: tuple[str, ...]
    """Irregularities, such as clocks that went backwards, as sentences."""

    @property
    def elapsed_seconds(self) -> float:
        """Seconds from the first start to the last record, which are the sum of all parts."""
        return math.fsum((self.productive_seconds, *self.lost_seconds.values()))

    @property
    def ratio(self) -> float:
        """Goodput between 0 and 1; NaN if the elapsed time is 0."""
        elapsed = self.elapsed_seconds
        return self.productive_seconds / elapsed if elapsed > 0 else math.nan

    @property
    def changes(self) -> tuple[WorldChange, ...]:
        """All changes of the world after which training continued without reading a checkpoint."""
        return tuple(change for process in self.processes for change in process.changes)

    @property
    def changes_by_cause(self) -> dict[ChangeCause, int]:
        """Number of changes of the world by cause, in order of first occurrence."""
        return dict(Counter(change.cause for change in self.changes))

    @property
    def reconfiguration_seconds_by_cause(self) -> dict[ChangeCause, float]:
        """Seconds lost to changes of the world by cause; their sum is ``lost_seconds["reconfiguration"]``."""
        return {
            cause: math.fsum(
                change.seconds for change in self.changes if change.cause == cause
            )
            for cause in self.changes_by_cause
        }

    @property
    def world_sizes(self) -> tuple[tuple[float, int], ...]:
        """Pairs (Unix seconds, number of processes from then on), in order; 0 if no process was running."""
        points: list[tuple[float, int]] = []
        for process in self.processes:
            # A process that failed before its start event never recorded its world size.
            if process.world_size is not None:
                points.append((process.begin, process.world_size))
            points += [
                (change.time, change.world_size)
                for change in process.changes
                if change.world_size is not None
            ]
            points.append((process.end, 0))
        return tuple(points)

    @property
    def process_seconds(self) -> dict[str, float]:
        """Seconds of all processes together, by cause and ``productive``.

        The seconds of each part are multiplied by its average number of processes.
        """
        totals = dict.fromkeys(("productive", *CAUSES), 0.0)
        for one in self.processes:
            number = one.mean_world_size
            for cause, seconds in one.seconds.items():
                # During downtime no process was running, so no process waited.
                totals[cause] += 0.0 if cause == "downtime" else seconds * number
        return totals

    @property
    def restarts_by_cause(self) -> dict[str, int]:
        """Number of restarts by cause, in order of first occurrence."""
        return dict(Counter(restart.cause for restart in self.restarts))
