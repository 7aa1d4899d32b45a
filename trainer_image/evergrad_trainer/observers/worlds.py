"""Changes of a run's world: who came and went, and how long training stood still for it. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from evergrad_coordinator.causes import ChangeCause, read_change
from evergrad_trainer.observers.events import saved_step, seconds_of
from evergrad_trainer.observers.history import StepTable
from evergrad_trainer.records import EvaluationRecord, Event, EventType


@dataclass(frozen=True)
class WorldChange:
    """One change.

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


def words_of(world: Event) -> str:
    """The cause of a ``world`` event in words; a file of an older version has them where its
    cause would be."""
    return str(world.fields.get("detail") or world.fields.get("cause") or "")


def is_positive(value: object) -> bool:
    """Whether a field holds a number of processes."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def measure_changes(
    events: Sequence[Event],
    steps: StepTable,
    rows: npt.NDArray[np.int64],
    evaluations: Sequence[EvaluationRecord],
) -> tuple[WorldChange, ...]:
    """The changes among the ``events`` of one part of a run, which has these ``rows`` and evaluations.

    Where several changes follow each other without a step in between, each has the time up to its own event,
    the last one the rest too. What saves and evaluations claim of the time is not counted again.
    """
    worlds = [event for event in events if event.type == EventType.WORLD]
    if not worlds:
        return ()
    order = rows[np.argsort(steps.generation[rows], kind="stable")]
    places = np.searchsorted(
        steps.generation[order], [event.generation for event in worlds], side="left"
    ).tolist()
    changes = []
    for index, world in enumerate(worlds):
        place = places[index]
        is_first = index == 0 or places[index - 1] != place
        is_last = index == len(worlds) - 1 or places[index + 1] != place
        before = _row_before(order[:place], steps, world.time)
        if not is_first:
            begin = worlds[index - 1].time
        elif before is not None:
            begin = float(steps.time[before])
        else:
            begin = _last_sign(world, events, evaluations)
        end, heard = world.time, events
        if is_last and place < len(order):
            after = order[place]
            end = max(
                end,
                float(np.nan_to_num(steps.time[after] - steps.step_seconds[after], nan=end)),
            )
        else:
            # Whatever this world saves, it saves after its own event.
            heard = [event for event in events if event.generation < world.generation]
        claimed = _evaluating(evaluations, begin, end)
        if is_first and before is not None:
            claimed += _saving(heard, steps, before, later=order[place:])
        changes.append(_change(world, max(0.0, end - begin - claimed)))
    return tuple(changes)


def _change(world: Event, seconds: float) -> WorldChange:
    size, from_size = world.fields.get("world_size"), world.fields.get("from_world_size")
    return WorldChange(
        time=world.time,
        generation=world.generation,
        step=world.step,
        world_size=size if is_positive(size) else None,
        from_world_size=from_size if is_positive(from_size) else None,
        cause=read_change(world.fields.get("cause")),
        detail=words_of(world),
        seconds=seconds if math.isfinite(seconds) else 0.0,
    )


def _row_before(rows: npt.NDArray[np.int64], steps: StepTable, time: float) -> int | None:
    """The last of these rows that was written by ``time``: one who was frozen may write an old row much
    later."""
    for row in rows[::-1]:
        if steps.time[row] <= time:
            return int(row)
    return None


def _last_sign(
    world: Event, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> float:
    """Where no step was before a change: what was heard last before it."""
    older = [
        event.time
        for event in events
        if event.generation < world.generation and event.time <= world.time
    ]
    older += [
        one.time
        for one in evaluations
        if one.generation < world.generation and one.time <= world.time
    ]
    return max(older, default=world.time)


def _evaluating(evaluations: Sequence[EvaluationRecord], begin: float, end: float) -> float:
    """Seconds that evaluations claim of the time from ``begin`` to ``end``."""
    return math.fsum(
        one.seconds for one in evaluations if begin < one.time <= end and one.seconds > 0
    )


def _saving(
    events: Sequence[Event], steps: StepTable, row: int, *, later: npt.NDArray[np.int64]
) -> float:
    """Seconds that saves of a row's step claim of the time after it; they are reported later.

    Where the worlds after it forgot that step and trained it again, among the rows ``later``, a save may be
    of that one.
    """
    step = int(steps.step[row])
    again = later[steps.step[later] == step][:1]
    generation, time = (
        (steps.generation[again[0]], steps.time[again[0]])
        if len(again)
        else (math.inf, math.inf)
    )
    saves = [
        event for event in events if event.type == EventType.SAVE and saved_step(event) == step
    ]
    saves += [
        event for event in events if event.type == EventType.SAVE_FAILED and event.step == step
    ]
    return math.fsum(
        seconds_of(event, "blocking_seconds")
        for event in saves
        if event.generation < generation or event.time < time
    )
