"""The accounts of a run as values: its processes, restarts and changes of its world, and their seconds."""

import math
from dataclasses import dataclass

from evergrad_common.causes import LOSSES, ChangeCause

CAUSES = tuple(LOSSES)
"""Causes of lost time.

startup: process start → first step, less what restore, evaluation and checkpoint claim of it · restore:
reading a checkpoint · recompute: steps that were trained again later · checkpoint: training stood still for a
save · evaluation · reconfiguration: last step in one world → first step in the next, less what evaluation and
checkpoint claim of it · downtime: no process was there · other: between the steps, and after the last one.
"""


@dataclass(frozen=True)
class WorldChange:
    """One change of the processes that train together, in which no checkpoint was read.

    ``seconds``: training stood still for it, from the last step before it to the first step after it.
    """

    time: float
    generation: int
    step: int
    """Last finished step in the state that goes on."""
    world_size: int | None
    from_world_size: int | None
    cause: ChangeCause
    detail: str
    """The cause in the coordinator's words."""
    seconds: float


@dataclass(frozen=True)
class ProcessAccount:
    """One process of the run, or all those that handed its state on from world to world, from one start to
    the next.

    ``seconds`` has every cause of CAUSES and ``productive``; they sum to its share of the time.
    ``world_size``: at its start.
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
    """``running or killed`` for the last one without an end; else a cause of Restart or ``complete``."""
    detail: str
    seconds: dict[str, float]
    changes: tuple[WorldChange, ...] = ()

    @property
    def mean_world_size(self) -> float:
        """Number of processes on average over its time; 1 where nothing said how many they were."""
        size, since, area = self.world_size or 1, self.begin, 0.0
        for change in self.changes:
            # Clocks of two machines may differ: no interval is below 0.
            at = min(max(change.time, since), self.end)
            area += size * (at - since)
            size, since = change.world_size or size, at
        area += size * (self.end - since)
        return area / (self.end - self.begin) if self.end > self.begin else float(size)


@dataclass(frozen=True)
class Restart:
    """One new start of the run.

    ``cause``: signal, stop_file, stop_after_steps, after_step, complete (extended), failed or killed.
    """

    cause: str
    detail: str
    time: float
    generation: int
    resumed_from: int | None
    downtime_seconds: float
    repeated_steps: int
    """Finished steps of the process before that were lost with it."""


@dataclass(frozen=True)
class Goodput:
    """The accounts of a run; all its times in seconds."""

    productive_seconds: float
    lost_seconds: dict[str, float]
    """Every cause of CAUSES; none is negative."""
    processes: tuple[ProcessAccount, ...]
    restarts: tuple[Restart, ...]
    notes: tuple[str, ...]
    """Clocks that went backwards and the like, as sentences."""

    @property
    def elapsed_seconds(self) -> float:
        """First start to last evidence: by definition the sum of all parts."""
        return math.fsum((self.productive_seconds, *self.lost_seconds.values()))

    @property
    def ratio(self) -> float:
        """Goodput between 0 and 1; not a number for a run without time."""
        elapsed = self.elapsed_seconds
        return self.productive_seconds / elapsed if elapsed > 0 else math.nan

    @property
    def changes(self) -> tuple[WorldChange, ...]:
        """All changes of the world in which training went on without reading a checkpoint."""
        return tuple(change for process in self.processes for change in process.changes)

    @property
    def changes_by_cause(self) -> dict[ChangeCause, int]:
        """How many changes of the world each cause had, in order of their first appearance."""
        counts: dict[ChangeCause, int] = {}
        for change in self.changes:
            counts[change.cause] = counts.get(change.cause, 0) + 1
        return counts

    @property
    def reconfiguration_seconds_by_cause(self) -> dict[ChangeCause, float]:
        """Seconds lost to changes of the world, by their cause; they sum to
        ``lost_seconds["reconfiguration"]``."""
        return {
            cause: math.fsum(
                change.seconds for change in self.changes if change.cause == cause
            )
            for cause in self.changes_by_cause
        }

    @property
    def world_sizes(self) -> tuple[tuple[float, int], ...]:
        """(Unix seconds, processes from then on), in order; 0 where no process was there."""
        points: list[tuple[float, int]] = []
        for process in self.processes:
            # A process that failed before its start never said how many it was with.
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
        """Seconds of all processes that train together, by cause and ``productive``.

        Each part's seconds count as often as it had processes, on average over its time.
        """
        totals = dict.fromkeys(("productive", *CAUSES), 0.0)
        for one in self.processes:
            number = one.mean_world_size
            for cause, seconds in one.seconds.items():
                # While no process was there, none waited.
                totals[cause] += 0.0 if cause == "downtime" else seconds * number
        return totals

    @property
    def restarts_by_cause(self) -> dict[str, int]:
        """How many restarts each cause had, in order of their first appearance."""
        counts: dict[str, int] = {}
        for restart in self.restarts:
            counts[restart.cause] = counts.get(restart.cause, 0) + 1
        return counts
