"""Computes a run's time accounts from its files, by adding the records in chronological order."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from evergrad_trainer.base.records import EvaluationRecord, Event, EventType
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import StepTable
from evergrad_trainer.observers.time_account import Account

_OPENING = (EventType.START, EventType.WORLD)
"""Events with which a generation begins, independent of the clock of their process."""


def account(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Goodput:
    """Compute the accounts of all processes of a run.

    A killed process has no end event; this is not an error.
    """
    fold = Account()
    # Keep the steps as columns, because a million records would not fit in memory next to them.
    rows = zip(
        steps.step.tolist(),
        steps.generation.tolist(),
        steps.world_size.tolist(),
        steps.step_seconds.tolist(),
        steps.time.tolist(),
        strict=True,
    )
    done = 0
    for place, record in _places(steps, events, evaluations):
        for row in islice(rows, place - done):
            fold.add_step(*row)
        done = place
        fold.add(record)

    # Add the steps after the last event, as in a running run.
    for row in rows:
        fold.add_step(*row)
    fold.finish()
    return fold.goodput()


def _places(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Iterator[tuple[int, Event | EvaluationRecord]]:
    """Yield each event and evaluation with the number of step rows that come before it, in order.

    Processes are ordered by generation, because each start and each change of the world increases it and
    clocks of two machines may differ. Within a generation, one process writes all three files with one clock.
    """
    # A row of an older generation after newer rows was written late, and keeps its place in the file.
    generations = np.maximum.accumulate(steps.generation)
    times = _rising(generations, steps.time)

    # Sort by generation, with the event that opens a generation first, and then by time. At the same time,
    # evaluations come before events, and each kind keeps the order of its file.
    keyed = []
    kinds: tuple[Sequence[Event | EvaluationRecord], ...] = (evaluations, events)
    for kind, records in enumerate(kinds):
        # An older process may write its last events after a newer process has begun.
        ordered = sorted(records, key=lambda one: one.generation)
        own_generations = np.array([one.generation for one in ordered], np.int64)
        own_times = np.array([one.time for one in ordered], np.float64)
        rising = _rising(own_generations, own_times).tolist()
        for index, record in enumerate(ordered):
            key = record.generation, True, rising[index], kind, index
            if isinstance(record, Event) and record.type in _OPENING:
                key = record.generation, False, -math.inf, kind, index
            keyed.append((key, record))

    # A record comes after the rows of its generation that were written before it.
    keyed.sort(key=lambda one: one[0])
    for (generation, _, time, _, _), record in keyed:
        first, last = np.searchsorted(generations, [generation, generation + 1]).tolist()
        before = int(np.searchsorted(times[first:last], time, side="right"))
        yield first + before, record


def _rising(
    generations: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Make the times of each generation non-decreasing, so that rows stay in the order of the file even if a
    clock went back."""
    inner = (np.nonzero(np.diff(generations))[0] + 1).tolist()
    edges = [0, *inner, len(generations)]
    parts = [np.zeros(0)]
    for first, last in pairwise(edges):
        # Skip the empty span of a file without rows, which cannot be accumulated.
        if last > first:
            known = np.nan_to_num(times[first:last], nan=-math.inf)
            parts.append(np.fmax.accumulate(known))
    return np.concatenate(parts)
