"""Folds a run's files into its accounts of time: the records in the order in which they happened."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import numpy as np
import numpy.typing as npt

from evergrad_trainer.observers.account import Account
from evergrad_trainer.observers.goodput import Goodput
from evergrad_trainer.observers.history import StepTable
from evergrad_trainer.records import EvaluationRecord, Event, EventType


def account(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Goodput:
    """Account for all processes of a run.

    A killed process has no end event; that is no error.
    """
    fold = Account()
    columns = (steps.step, steps.generation, steps.world_size, steps.step_seconds, steps.time)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    done = 0
    # Steps stay columns until they are folded: a million records would not fit beside them.
    for place, record in _places(steps, events, evaluations):
        for row in islice(rows, place - done):
            fold.add_step(*row)
        done = place
        fold.add(record)
    for row in rows:
        fold.add_step(*row)
    fold.finish()
    return fold.goodput()


def _places(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Iterator[tuple[int, Event | EvaluationRecord]]:
    """Yield each event and evaluation with the number of step rows that come before it, in order.

    Generations order the processes, since each start and each change of the world raises them and clocks of
    two machines may differ. Within a generation one process writes all three files, by one clock.
    """
    # A row of an older generation after newer ones was written late: it stays where it is in the file.
    generations = np.maximum.accumulate(steps.generation)
    times = _rising(generations, steps.time)
    keyed = []
    kinds: tuple[Sequence[Event | EvaluationRecord], ...] = (evaluations, events)
    for kind, records in enumerate(kinds):
        # A process that was overtaken may write its last events after the newer one has begun.
        ordered = sorted(records, key=lambda one: one.generation)
        rising = _rising(
            np.array([one.generation for one in ordered], np.int64),
            np.array([one.time for one in ordered], np.float64),
        )
        for index, (record, time) in enumerate(zip(ordered, rising.tolist(), strict=True)):
            opens = isinstance(record, Event) and record.type in (
                EventType.START,
                EventType.WORLD,
            )
            place = (record.generation, not opens, -math.inf if opens else time)
            keyed.append(((*place, kind, index), record))
    for (generation, _, time, _, _), record in sorted(keyed, key=lambda one: one[0]):
        first, last = np.searchsorted(generations, [generation, generation + 1]).tolist()
        yield first + int(np.searchsorted(times[first:last], time, side="right")), record


def _rising(
    generations: npt.NDArray[np.int64], times: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Raise the times so that each is at least as late as those before it in its generation: files are read
    in their order also where a clock went back."""
    edges = [0, *(np.nonzero(np.diff(generations))[0] + 1).tolist(), len(generations)]
    parts = [
        np.fmax.accumulate(np.nan_to_num(times[first:last], nan=-math.inf))
        for first, last in pairwise(edges)
        if last > first
    ]
    return np.concatenate([np.zeros(0), *parts])
