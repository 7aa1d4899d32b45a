"""Folds a run's files into its accounts of time: the records in the order in which they happened."""

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
"""Events with which a generation begins, whatever the clock of their process says."""


def account(
    steps: StepTable, events: Sequence[Event], evaluations: Sequence[EvaluationRecord]
) -> Goodput:
    """Account for all processes of a run.

    A killed process has no end event; that is no error.
    """
    fold = Account()
    # Steps stay columns until they are folded: a million records would not fit beside them.
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

    # Steps after the last event, as in a run that trains just now.
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

    # The key of each record: its generation, what opens one first, then the time. At one time, evaluations
    # come before events, and each kind keeps the order of its file.
    keyed = []
    kinds: tuple[Sequence[Event | EvaluationRecord], ...] = (evaluations, events)
    for kind, records in enumerate(kinds):
        # A process that was overtaken may write its last events after the newer one has begun.
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
    """Raise the times so that each is at least as late as those before it in its generation: files are read
    in their order also where a clock went back."""
    inner = (np.nonzero(np.diff(generations))[0] + 1).tolist()
    edges = [0, *inner, len(generations)]
    parts = [np.zeros(0)]
    for first, last in pairwise(edges):
        # Without rows there is one empty span, of which nothing can be accumulated.
        if last > first:
            known = np.nan_to_num(times[first:last], nan=-math.inf)
            parts.append(np.fmax.accumulate(known))
    return np.concatenate(parts)
