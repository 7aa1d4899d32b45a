"""Converts the run's records to values for trackers, and reads records that a tracker has missed from the
run's files. Pure, except for reading."""

import math
from collections.abc import Iterator, Mapping
from heapq import merge

from evergrad_common.metrics import SHOWN, Throughput
from evergrad_trainer.base.records import EvaluationRecord, RunInfo, StepRecord
from evergrad_trainer.observers.history import read_evaluations_in_time, read_steps
from evergrad_trainer.observers.trackers.interface import Shown
from evergrad_trainer.observers.utilisation import flops_per_second, utilisation
from evergrad_trainer.run.directory import RunDirectory

Record = StepRecord | EvaluationRecord


def values_of(record: Record, info: RunInfo, throughput: Throughput) -> dict[str, float]:
    """Return the values of a record that a tracker shows, without NaN and infinite values, such as the loss
    of a skipped step. ``throughput``: contains the previous steps."""
    if isinstance(record, EvaluationRecord):
        measured = {"loss": record.loss, "perplexity": record.perplexity, **record.metrics}
        named = {f"evaluation/{record.name}/{name}": one for name, one in measured.items()}
    else:
        per_second = throughput.add(
            generation=record.generation,
            tokens=record.tokens,
            step_seconds=record.step_seconds,
            time=record.time,
        )
        measured = {
            **{name: getattr(record, name) for name in SHOWN},
            "step_seconds": record.step_seconds,
            "tokens_per_second": per_second,
            "world_size": record.world_size,
            **record.metrics,
        }
        speed, share = flops_per_second(info, record), utilisation(info, record)
        measured |= {} if speed is None else {"flops_per_second": speed}
        measured |= {} if share is None else {"mfu": share}
        named = {f"train/{name}": one for name, one in measured.items()}
    return {name: float(one) for name, one in named.items() if math.isfinite(one)}


def read_missed(directory: RunDirectory, shown: Shown, *, newest: int) -> Iterator[Record]:
    """Yield the records up to step ``newest`` that are not shown yet, in order of steps. A step's last record
    is valid.

    Raises RunDirectoryError if the files cannot be read.
    """
    notes: list[str] = []
    table = read_steps(directory, notes)
    rows = [row for row in table.last_rows() if shown.step < table.step[row] <= newest]
    evaluations: dict[tuple[int, str], EvaluationRecord] = {}
    for one in read_evaluations_in_time(directory.evaluation, notes, table.beginnings):
        if one.step <= newest and not shown.has_evaluation(one.name, one.step):
            evaluations[one.step, one.name] = one
    # Yield each step before its evaluations, in order, because trackers do not accept an older step.
    steps: Iterator[Record] = (table.record(int(row)) for row in rows)
    others: Iterator[Record] = (evaluations[key] for key in sorted(evaluations))
    yield from merge(
        steps, others, key=lambda one: (one.step, isinstance(one, EvaluationRecord))
    )


def advance(shown: Shown, record: Record) -> Shown:
    """Return the shown records after ``record`` is shown."""
    if isinstance(record, EvaluationRecord):
        newest: Mapping[str, int] = {**shown.evaluations, record.name: record.step}
        return Shown(shown.step, newest, shown.others)
    return Shown(record.step, shown.evaluations, shown.others)


def is_shown(shown: Shown, record: Record) -> bool:
    if isinstance(record, EvaluationRecord):
        return shown.has_evaluation(record.name, record.step)
    return record.step <= shown.step
