"""Where the time of a run went: productive seconds, and lost ones by cause. Pure.

Goodput = time in steps that were kept / elapsed time, as in Google's ml-goodput-measurement. A step is kept
when no later process had to begin before it and no later row repeats it.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from evergrad_coordinator.causes import LOSSES, ChangeCause
from evergrad_coordinator.text import duration
from evergrad_trainer.observers.events import seconds_of
from evergrad_trainer.observers.history import StepTable
from evergrad_trainer.observers.worlds import WorldChange, is_positive, measure_changes
from evergrad_trainer.records import EvaluationRecord, Event, EventType

CAUSES = tuple(LOSSES)
"""What time is lost to.

startup: process start → first step, less what restore, evaluation and checkpoint claim of it · restore:
reading a checkpoint · recompute: steps that were trained again later · checkpoint: training stood still for a
save · evaluation · reconfiguration: last step in one world → first step in the next, less what evaluation and
checkpoint claim of it · downtime: no process was there · other: between the steps, and after the last one.
"""

_CLOCK_TOLERANCE_SECONDS = 0.001
_CLOCKS_APART_SECONDS = 1.0
"""So much the clocks of two machines may differ: in another world another one writes."""


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


@dataclass(frozen=True)
class Restart:
    """One new beginning.

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
            cause: math.fsum(change.seconds for change in self.changes if change.cause == cause)
            for cause in self.changes_by_cause
        }

    @property
    def world_sizes(self) -> tuple[tuple[float, int], ...]:
        """(Unix seconds, processes from then on), in order; 0 where no process was there."""
        points: list[tuple[float, int]] = []
        for process in self.processes:
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
    def restarts_by_cause(self) -> dict[str, int]:
        """How many restarts each cause had, in order of their first appearance."""
        counts: dict[str, int] = {}
        for restart in self.restarts:
            counts[restart.cause] = counts.get(restart.cause, 0) + 1
        return counts


def account(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Goodput:
    """Account for all processes of a run, in the order of their files.

    A killed process has no end event; that is no error.
    """
    parts = _split(steps, events, evaluations)
    if not parts:
        return Goodput(0.0, dict.fromkeys(CAUSES, 0.0), (), (), ())
    kept = _kept(steps, parts)
    accounts: list[ProcessAccount] = []
    notes: list[str] = []
    for index, part in enumerate(parts):
        previous_end = accounts[-1].end if accounts else None
        accounts.append(
            _account_process(
                part, kept, previous_end=previous_end, is_last=index == len(parts) - 1
            )
        )
        notes.extend(_odd_clocks(part, previous_end))
    restarts = tuple(
        _restart(parts[i], accounts[i], accounts[i - 1], parts[i - 1])
        for i in range(1, len(parts))
    )
    return Goodput(
        productive_seconds=math.fsum(one.seconds["productive"] for one in accounts),
        lost_seconds={
            cause: math.fsum(one.seconds[cause] for one in accounts) for cause in CAUSES
        },
        processes=tuple(accounts),
        restarts=restarts,
        notes=tuple(notes),
    )


@dataclass
class _Part:
    """What one process has left.

    ``rows``: its rows' indices; ``start``: None where its start event is lost.
    """

    generation: int
    start: Event | None
    steps: StepTable
    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    events: list[Event] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)

    @property
    def resumed_from(self) -> int | None:
        """Finished steps it began with; 0 for a fresh start; None where nobody knows."""
        if self.start is None or "resumed_from" not in self.start.fields:
            return None
        value = self.start.fields["resumed_from"]
        return value if isinstance(value, int) else 0

    @property
    def begin(self) -> float:
        if self.start is not None:
            claimed = self.start.fields.get("process_start_time")
            is_sane = isinstance(claimed, int | float) and 0 < claimed <= self.start.time
            return float(claimed) if is_sane and claimed is not None else self.start.time
        begins = [
            float(self.steps.time[row] - self.steps.step_seconds[row]) for row in self.rows[:1]
        ]
        begins += [
            *(event.time for event in self.events),
            *(one.time - one.seconds for one in self.evaluations),
        ]
        return min((begin for begin in begins if math.isfinite(begin)), default=0.0)

    @property
    def times(self) -> list[npt.NDArray[np.float64]]:
        """Its evidence, each file's in order."""
        rows = self.steps.time[self.rows]
        events = np.array([event.time for event in self.events], np.float64)
        evaluations = np.array([one.time for one in self.evaluations], np.float64)
        return [times[np.isfinite(times)] for times in (rows, events, evaluations)]


def _split(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> list[_Part]:
    """Give every line to its process, by generation: each start raises it, and no line carries an
    older one."""
    parts = [
        _Part(event.generation, event, steps)
        for event in events
        if event.type == EventType.START
    ]
    parts += [
        _Part(generation, None, steps)
        for generation in _without_start(steps, events, evaluations)
    ]
    parts.sort(key=lambda part: part.generation)
    if not parts:
        return []
    begins = np.array([part.generation for part in parts], np.int64)

    def owner(generation: int) -> _Part:
        return parts[max(0, int(np.searchsorted(begins, generation, side="right")) - 1)]

    owners = np.clip(np.searchsorted(begins, steps.generation, side="right") - 1, 0, None)
    for index, part in enumerate(parts):
        part.rows = np.nonzero(owners == index)[0]
    for event in events:
        owner(event.generation).events.append(event)
    for one in evaluations:
        owner(one.generation).evaluations.append(one)
    return parts


def _without_start(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> set[int]:
    """Generations of processes that left no start event: they failed before it, or the events are lost
    altogether."""
    started = {event.generation for event in events if event.type == EventType.START}
    trained = set(np.unique(steps.generation).tolist())
    if not started:
        return (
            trained
            | {event.generation for event in events}
            | {one.generation for one in evaluations}
        )
    # A generation with steps, a world or a stop but no start goes on with the state of the one before; one
    # that only failed is a process of its own, unless its peers went on without it.
    goes_on = {
        event.generation for event in events if event.type in (EventType.WORLD, EventType.STOP)
    } | trained
    failed = (
        {
            event.generation
            for event in events
            if event.type in (EventType.FAILED, EventType.END)
        }
        - started
        - goes_on
    )
    begins = sorted(
        (event.generation, event.type)
        for event in events
        if event.type in (EventType.START, EventType.WORLD)
    )
    return {one for one in failed if _next_begin(begins, one) != EventType.WORLD}


def _next_begin(begins: Sequence[tuple[int, str]], generation: int) -> str | None:
    """Whether a start or another world came first after ``generation``; None where nothing came."""
    place = bisect.bisect_left(begins, (generation + 1, ""))
    return begins[place][1] if place < len(begins) else None


def _kept(steps: StepTable, parts: list[_Part]) -> npt.NDArray[np.bool_]:
    """Which rows count for good: the last of their step, and not after the step a later process or world
    began from."""
    holds = np.zeros(len(steps), np.bool_)
    earliest = math.inf
    for part in reversed(parts):
        holds[part.rows] = steps.step[part.rows] <= np.minimum(earliest, _bounds(part))
        earliest = min(earliest, math.inf if part.resumed_from is None else part.resumed_from)
    kept = np.zeros(len(steps), np.bool_)
    rows = np.nonzero(holds)[0]
    kept[rows[steps.take(rows).last_rows()]] = True
    return kept


def _bounds(part: _Part) -> npt.NDArray[np.float64]:
    """For each row of a part the earliest step from which a newer world of that part went on."""
    worlds = sorted(
        (event.generation, event.step) for event in part.events if event.type == EventType.WORLD
    )
    earliest = np.array([*(step for _, step in worlds), math.inf], np.float64)
    earliest = np.minimum.accumulate(earliest[::-1])[::-1]
    generations = np.array([generation for generation, _ in worlds], np.int64)
    return earliest[
        np.searchsorted(generations, part.steps.generation[part.rows], side="right")
    ]


def _seconds(values: npt.NDArray[np.float64]) -> float:
    return float(
        np.clip(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), 0.0, None).sum()
    )


def _begin(part: _Part, previous_end: float | None) -> float:
    """When a part of the run began. Of two that were there at once, the newer one began where the older one
    ended.

    A node outlives its workers: a start may name a process that was there before the last sign of the part
    before.
    """
    if previous_end is None or part.start is None or part.start.time < previous_end:
        return part.begin
    return max(part.begin, previous_end)


def _account_process(
    part: _Part, kept: npt.NDArray[np.bool_], *, previous_end: float | None, is_last: bool
) -> ProcessAccount:
    steps, rows, begin = part.steps, part.rows, _begin(part, previous_end)
    changes = measure_changes(part.events, steps, rows, part.evaluations)
    in_steps = steps.step_seconds[rows]
    restore = sum(
        seconds_of(event, "seconds")
        for event in part.events
        if event.type == EventType.RESTORED
    )
    seconds = {
        "productive": _seconds(in_steps[kept[rows]]),
        "recompute": _seconds(in_steps[~kept[rows]]),
        "restore": restore,
        "checkpoint": _blocking(part.events),
        "evaluation": sum(
            max(0.0, one.seconds) for one in part.evaluations if math.isfinite(one.seconds)
        ),
        "downtime": max(0.0, begin - previous_end) if previous_end is not None else 0.0,
        "reconfiguration": math.fsum(change.seconds for change in changes),
    }
    evidence = [float(times.max()) for times in part.times if len(times)]
    end = max([begin, *evidence])
    first = int(steps.generation[rows[0]]) if len(rows) else math.inf
    before_first = sum(change.seconds for change in changes if change.generation <= first)
    seconds["startup"] = _startup(part, begin, end, claimed=restore + before_first)
    # Durations come from a clock that never goes back. Where they exceed the wall time, the wall clock was
    # set.
    measured = math.fsum(value for cause, value in seconds.items() if cause != "downtime")
    seconds["other"] = max(0.0, end - begin - measured)
    ended, detail = _ending(part.events, is_last=is_last)
    start = part.start.fields if part.start is not None else {}
    return ProcessAccount(
        generation=part.generation,
        begin=begin,
        end=end,
        pid=start.get("pid"),
        world_size=_world_size(part),
        resumed_from=part.resumed_from,
        num_steps=len(rows),
        last_step=int(steps.step[rows[-1]]) if len(rows) else None,
        ended=ended,
        detail=detail,
        seconds=seconds,
        changes=changes,
    )


def _world_size(part: _Part) -> int | None:
    """Processes at the start of a part; None where nobody says."""
    said = part.start.fields.get("world_size") if part.start is not None else None
    if isinstance(said, int) and is_positive(said):
        return said
    return int(part.steps.world_size[part.rows[0]]) if len(part.rows) else None


def _blocking(events: Sequence[Event]) -> float:
    saves = (EventType.SAVE, EventType.SAVE_FAILED)
    return sum(seconds_of(event, "blocking_seconds") for event in events if event.type in saves)


def _startup(part: _Part, begin: float, end: float, *, claimed: float) -> float:
    """Process start → begin of the first step (or the end, without one), less what other causes ``claimed``
    of it."""
    first, until = math.inf, end
    if len(part.rows):
        row = part.rows[0]
        first, until = (
            float(part.steps.step[row]),
            float(part.steps.time[row] - part.steps.step_seconds[row]),
        )
    claimed += sum(
        one.seconds for one in part.evaluations if one.step < first and one.seconds > 0
    )
    claimed += _blocking([event for event in part.events if event.step < first])
    return max(0.0, until - begin - claimed) if math.isfinite(until) else 0.0


def _ending(events: Sequence[Event], *, is_last: bool) -> tuple[str, str]:
    """How a process ended, by what it wrote down, and the error's name and message where it failed."""
    unknown = ("running or killed", "") if is_last else ("killed", "")
    ending, has_failed = unknown, False
    for event in events:
        if event.type == EventType.WORLD:
            # One of its processes may have ended or failed; the others went on.
            ending, has_failed = unknown, False
        elif has_failed:
            continue
        elif event.type == EventType.STOP:
            ending = (str(event.fields.get("reason", "stop")), "")
        elif event.type == EventType.COMPLETE:
            ending = ("complete", "")
        elif event.type == EventType.FAILED:
            text = f"{event.fields.get('error', 'error')}: {event.fields.get('message', '')}".rstrip(
                ": "
            )
            ending, has_failed = ("failed", text), True
        elif event.type == EventType.END and ending == unknown:
            ending = (f"exit {event.fields.get('exit_code')}", "")
    return ending


def _restart(
    part: _Part, now: ProcessAccount, before: ProcessAccount, part_before: _Part
) -> Restart:
    begun_from = part.resumed_from
    lost = 0
    if begun_from is not None:
        lost = int(np.count_nonzero(part.steps.step[part_before.rows] > begun_from))
    return Restart(
        cause=before.ended,
        detail=before.detail,
        time=now.begin,
        generation=now.generation,
        resumed_from=begun_from,
        downtime_seconds=now.seconds["downtime"],
        repeated_steps=lost,
    )


def _odd_clocks(part: _Part, previous_end: float | None) -> list[str]:
    notes = []
    tolerance = _CLOCK_TOLERANCE_SECONDS
    if any(event.type == EventType.WORLD for event in part.events):
        tolerance = _CLOCKS_APART_SECONDS
    backwards = max(
        (-float(np.diff(times).min()) for times in part.times if len(times) > 1), default=0.0
    )
    if backwards > tolerance:
        notes.append(
            f"the clock went back by {duration(backwards)} while generation {part.generation} ran"
        )
    if (
        previous_end is not None
        and previous_end - _begin(part, previous_end) > _CLOCK_TOLERANCE_SECONDS
    ):
        notes.append(
            f"generation {part.generation} began {duration(previous_end - part.begin)} before "
            "the last sign of the one before: "
            "the clock went back, or both ran at once"
        )
    return notes
