"""Reads a run's JSON-lines files: steps as columns (a million steps fit in memory), evaluations and events
as records."""

import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from evergrad_common.metrics.columns import COLUMNS, Kind
from evergrad_common.stale_records import Beginnings, InTime
from evergrad_trainer.base.records import EvaluationRecord, Event, StepRecord
from evergrad_trainer.observers.events import parse_event_row
from evergrad_trainer.run.directory import (
    JsonLines,
    RunDirectory,
    parse_object,
    read_json_object,
    reported,
)

Integers = npt.NDArray[np.int64]
Hashes = npt.NDArray[np.uint64]
Reals = npt.NDArray[np.float64]

Row = TypeVar("Row")

_NAMES = tuple(column.name for column in COLUMNS)
_OPTIONAL = tuple(column.name for column in COLUMNS if column.is_optional)
_REQUIRED = tuple(column.name for column in COLUMNS if not column.is_optional)
_VALUES = itemgetter(*_REQUIRED)
_CODES: Final[Mapping[Kind, str]] = {"integer": "q", "hash": "Q", "real": "d"}
"""Type codes of array: signed and unsigned integers of 8 bytes, floats of 8 bytes. Words have no code."""
_CHUNK = 4096


@dataclass(frozen=True)
class StepTable:
    """The rows of metrics.jsonl as columns of equal length, in the order of the file.

    ``columns``: one column for each entry of the catalogue, also available as an attribute, for example
    ``steps.loss``. If a row lacks an optional number, its value is NaN; if it lacks an optional word, None.
    ``metrics``: one column for each metric of the recipe that occurs in any row; NaN if a row lacks it.
    ``beginnings``: when generations began again, according to the events.
    """

    columns: Mapping[str, npt.NDArray[Any]]
    metrics: Mapping[str, Reals] = field(default_factory=dict)
    beginnings: Beginnings = field(default_factory=Beginnings)

    def __getattr__(self, name: str) -> npt.NDArray[Any]:
        # ``copy`` looks up attributes before the object has fields.
        columns: Mapping[str, npt.NDArray[Any]] = self.__dict__.get("columns", {})
        if name not in columns:
            raise AttributeError(f"the catalogue of a step's columns has no {name!r}")
        return columns[name]

    def __len__(self) -> int:
        return len(self.step)

    @cached_property
    def rows_in_time(self) -> Integers:
        """Indices of the rows, without rows that a frozen process wrote late."""
        # In nearly every file generations never decrease, so that no row needs to be checked.
        if np.all(self.generation[1:] >= self.generation[:-1]):
            return np.arange(len(self))
        judge = InTime(self.beginnings)
        accepted = map(judge.accepts, self.generation.tolist(), self.time.tolist())
        return np.flatnonzero([*accepted])

    @property
    def newest_step(self) -> int:
        """Step of the newest row, or 0."""
        return int(self.step[self.rows_in_time[-1]]) if len(self) else 0

    def last_rows(self) -> Integers:
        """Return the indices of the last valid row of each step, in the order of steps."""
        # ``np.unique`` returns the first index of a step. In the reversed column this is the last row.
        rows = self.rows_in_time[::-1]
        _, from_the_end = np.unique(self.step[rows], return_index=True)
        return rows[from_the_end]

    def record(self, row: int) -> StepRecord:
        """Return one row as a record."""
        values: dict[str, Any] = {}
        for column in COLUMNS:
            value = self.columns[column.name][row]
            # Words stay as they are; numbers of numpy become numbers of Python.
            value = value if column.kind == "word" else value.item()
            if column.kind == "hash":
                value = f"{value:016x}"
            elif column.is_optional and column.kind == "real" and math.isnan(value):
                value = None
            values[column.name] = value
        metrics = {name: column[row].item() for name, column in self.metrics.items()}
        # A column has a value for each row, but a record has only the metrics of its own row.
        known = {name: value for name, value in metrics.items() if not math.isnan(value)}
        return StepRecord(**values, metrics=known)

    def take(self, rows: npt.NDArray[Any]) -> "StepTable":
        """Return a table of the rows that ``rows`` selects, by indices or by a mask."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        metrics = {name: column[rows] for name, column in self.metrics.items()}
        return StepTable(columns, metrics, self.beginnings)


class _Columns:
    """Collector of rows into typed columns.

    ``extend`` raises KeyError, TypeError, ValueError or OverflowError if a row is invalid.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Any] = {
            one.name: [] if one.kind == "word" else array(_CODES[one.kind])
            for one in COLUMNS
        }
        self._metrics: dict[str, array[float]] = {}

    def extend(self, rows: list[dict[str, Any]]) -> None:
        """Append all rows (at least one). After an exception the object must not be used again."""
        first = len(self)
        # Column by column: a loop over cells in Python would take minutes for a long run.
        by_name: dict[str, Sequence[Any]] = dict(
            zip(_REQUIRED, zip(*map(_VALUES, rows), strict=True), strict=True)
        )
        by_name |= {name: [row.get(name) for row in rows] for name in _OPTIONAL}
        for one in COLUMNS:
            column, values = self._columns[one.name], by_name[one.name]
            if one.kind == "word":
                # The column repeats a few words, so each word is stored only once.
                column.extend(
                    [None if value is None else intern(value) for value in values]
                )
            elif one.kind == "hash":
                column.extend([int(value, 16) for value in values])
            elif one.kind == "integer" or None not in values:
                column.extend(values)
            else:
                column.extend([math.nan if value is None else value for value in values])
        # A recipe has few metrics, and each may be missing from any row. Therefore read them row by row.
        for place, row in enumerate(rows, start=first):
            metrics = row.get("metrics", {})
            if not isinstance(metrics, Mapping):
                raise TypeError("metrics is no mapping")
            for name, value in metrics.items():
                metric = self._metrics.setdefault(name, array("d"))
                missing = place - len(metric)
                metric.extend([math.nan] * missing)
                metric.append(math.nan if value is None else value)

    def __len__(self) -> int:
        return len(self._columns["step"])

    def table(self) -> StepTable:
        # Fill each column with NaN after the last row that has the metric.
        for column in self._metrics.values():
            column.extend([math.nan] * (len(self) - len(column)))

        # Views, not copies, because the columns of a long run take most of a report's memory.
        columns = {
            name: np.array(one, object)
            if isinstance(one, list)
            else np.asarray(memoryview(one))
            for name, one in self._columns.items()
        }
        metrics = {name: np.asarray(memoryview(one)) for name, one in self._metrics.items()}
        return StepTable(columns, metrics)


def tabulate(rows: list[dict[str, Any]]) -> StepTable:
    """Put rows of metrics.jsonl into columns.

    Raises KeyError, TypeError, ValueError or OverflowError if a row is invalid.
    """
    columns = _Columns()
    if rows:
        columns.extend(rows)
    return columns.table()


@dataclass(frozen=True)
class History:
    """The records of a run. ``notes``: irregularities in the files, as sentences."""

    steps: StepTable
    evaluations: tuple[EvaluationRecord, ...]
    """Evaluations that the run itself made."""
    events: tuple[Event, ...]
    results: tuple[EvaluationRecord, ...] = ()
    """Results of ``evergrad evaluate``, in the order of steps and sets."""
    notes: tuple[str, ...] = ()


def read_history(directory: RunDirectory) -> History:
    """Read the three files of a run and the results of ``evergrad evaluate``.

    A missing file counts as empty. An unfinished last line, from a killed or running process, is ignored.
    Raises RunDirectoryError, naming file and line, if a line is not a valid row of its file.
    """
    notes: list[str] = []
    steps = read_steps(directory, notes)
    evaluations = tuple(read_evaluations(directory.evaluation, notes))
    events = tuple(_parsed(directory.events, notes, parse_event_row))
    return History(
        steps=steps,
        evaluations=evaluations,
        events=events,
        results=read_results(directory, notes),
        notes=tuple(notes),
    )


def read_results(directory: RunDirectory, notes: list[str]) -> tuple[EvaluationRecord, ...]:
    """Read the results of ``evergrad evaluate``; appends a sentence to ``notes`` for each file that is not a
    result.

    Raises RunDirectoryError if a file cannot be read.
    """
    found = []
    for path in sorted(directory.evaluations.glob("*.json")):
        # Results are written atomically, so another program wrote or changed a file that cannot be parsed.
        row = read_json_object(path) or {}
        try:
            found.append(_evaluation(row))
        except (TypeError, ValueError) as error:
            notes.append(f"{path.name} is no result of an evaluation: it {error}")
    return tuple(
        sorted(found, key=lambda one: (one.step, one.generation, one.name, one.time))
    )


def read_steps(directory: RunDirectory, notes: list[str]) -> StepTable:
    """Read the rows of metrics.jsonl; appends irregularities to ``notes``.

    Raises RunDirectoryError, naming the line, if a row is invalid.
    """
    columns, lines = _Columns(), JsonLines(directory.metrics)
    rows = iter(lines)
    # Chunk by chunk, because a million rows as dictionaries would not fit in memory next to their columns.
    while chunk := list(islice(rows, _CHUNK)):
        try:
            columns.extend([row for _, row in chunk])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            # Find the invalid row only now, so that valid files are read quickly: check each row, and each
            # field of the first invalid row.
            for number, row in chunk:
                if missing := [name for name in _REQUIRED if name not in row]:
                    why = f"has no {' and no '.join(missing)}"
                    raise lines.malformed(number, why) from error
                if _fits(row):
                    continue
                if _fits({**row, "metrics": {}}):
                    why = f"has impossible metrics, {row['metrics']!r}"
                    raise lines.malformed(number, why) from error
                # Report the first field that makes an otherwise valid row invalid.
                given = [name for name in _NAMES if name in row]
                bad = [name for name in given if not _fits(_EXAMPLE | {name: row[name]})]
                name = bad[0] if bad else _NAMES[0]
                why = f"has an impossible {name}, {row[name]!r}"
                raise lines.malformed(number, why) from error
            raise lines.malformed(chunk[0][0], "is not a row of this file") from error
    _note_torn(lines, notes)
    return replace(columns.table(), beginnings=read_beginnings(directory))


def read_evaluations(path: Path, notes: list[str]) -> Iterator[EvaluationRecord]:
    """Read the rows of an evaluation file; appends irregularities to ``notes``.

    Raises RunDirectoryError, naming the line, if a row is invalid.
    """
    return _parsed(path, notes, _evaluation)


def read_evaluations_in_time(
    path: Path, notes: list[str], beginnings: Beginnings
) -> Iterator[EvaluationRecord]:
    """Read evaluations as ``read_evaluations`` does, without rows that a frozen process wrote late."""
    judge = InTime(beginnings)
    for one in read_evaluations(path, notes):
        if judge.accepts(one.generation, one.time):
            yield one


def _fits(row: dict[str, Any]) -> bool:
    try:
        _Columns().extend([row])
    except (TypeError, ValueError, OverflowError):
        return False
    return True


_EXAMPLE: dict[str, Any] = {
    one.name: "0" if one.kind == "hash" else 0 for one in COLUMNS if not one.is_optional
}


def _evaluation(row: dict[str, Any]) -> EvaluationRecord:
    names = [column.name for column in fields(EvaluationRecord) if column.name != "metrics"]
    missing = [name for name in names if name not in row]
    if missing:
        raise ValueError(f"has no {' and no '.join(missing)}")
    values = {name: row[name] for name in names}
    # JSON has no NaN; the writer replaces it with null.
    for name in ("loss", "perplexity", "seconds", "time"):
        values[name] = math.nan if values[name] is None else float(values[name])
    for name in ("step", "generation", "tokens"):
        values[name] = int(values[name])
    values["name"] = str(values["name"])

    # Metrics of a recipe: only the row contains their names.
    found = row.get("metrics", {})
    if not isinstance(found, dict):
        raise ValueError(f"has impossible metrics, {found!r}")
    metrics: dict[str, float] = {}
    for name, value in found.items():
        metrics[name] = math.nan if value is None else float(value)
    return EvaluationRecord(**values, metrics=metrics)


def _parsed(
    path: Path,
    notes: list[str],
    parse: Callable[[dict[str, Any]], Row],
) -> Iterator[Row]:
    lines = JsonLines(path)
    for number, row in lines:
        try:
            yield parse(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise lines.malformed(number, str(error)) from error
    _note_torn(lines, notes)


def _note_torn(lines: JsonLines, notes: list[str]) -> None:
    if lines.torn_bytes:
        notes.append(
            f"{lines.path.name} ends with {lines.torn_bytes} bytes of an unfinished line: "
            "the process was killed, or is writing just now"
        )


@dataclass(frozen=True)
class Before:
    """Facts about earlier processes of the run that a new process can read in milliseconds."""

    highest_step: int = 0
    last_time: float | None = None
    """Unix seconds of the newest row or event."""


def read_before(directory: RunDirectory, *, tail_bytes: int = 4 << 20) -> Before:
    """Read the ends of metrics.jsonl and events.jsonl, some ten thousand rows, in milliseconds.

    Raises RunDirectoryError.
    """
    # Read only the ends: a start must not read gigabytes to find where the previous process stopped.
    rows = [*_tail(directory.metrics, tail_bytes)]
    times = [row.get("time") for row in (*rows, *_tail(directory.events, 1 << 16))]
    beginnings = read_beginnings(directory, tail_bytes=tail_bytes)
    return Before(
        highest_step=max(_steps_in_time(rows, beginnings), default=0),
        last_time=max(
            (float(at) for at in times if isinstance(at, int | float)), default=None
        ),
    )


def _tail(path: Path, num_bytes: int) -> Iterator[dict[str, Any]]:
    with reported(path, what="cannot be read"):
        try:
            with path.open("rb") as file:
                start = max(0, file.seek(0, os.SEEK_END) - num_bytes)
                file.seek(start)
                lines = file.read().split(b"\n")
        except FileNotFoundError:
            return
    # If the part begins inside the file, its first line is incomplete.
    for line in lines[1:] if start else lines:
        row = parse_object(line)
        if row is not None:
            yield row


def last_step(directory: RunDirectory, *, tail_bytes: int = 64 << 10) -> int:
    """Read the step of the last row of metrics.jsonl, or 0."""
    beginnings = read_beginnings(directory, tail_bytes=tail_bytes)
    steps = [0, *_steps_in_time(_tail(directory.metrics, tail_bytes), beginnings)]
    return steps[-1]


def read_beginnings(directory: RunDirectory, *, tail_bytes: int = 1 << 30) -> Beginnings:
    """Read from the last ``tail_bytes`` of events.jsonl when generations began again.

    Raises RunDirectoryError if the file cannot be read.
    """
    found = Beginnings()
    for row in _tail(directory.events, tail_bytes):
        found.note(row.get("type"), row.get("generation"), row.get("time"))
    return found


def _steps_in_time(rows: Iterable[dict[str, Any]], beginnings: Beginnings) -> Iterator[int]:
    """Steps of rows of metrics.jsonl, without rows that a frozen process wrote late; see
    ``StepTable.rows_in_time``."""
    judge = InTime(beginnings)
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and judge.accepts(row.get("generation"), row.get("time")):
            yield step
