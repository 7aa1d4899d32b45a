"""Writes metrics.jsonl, events.jsonl and evaluation.jsonl: one strict JSON object a line, in the file when the call returns."""

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import event_row
from evergrad_trainer.records import EvaluationRecord, Event, EventType, RunInfo, StepRecord
from evergrad_trainer.run_directory import RunDirectory, dumps_strict, encode_text, mend_last_line, reported

_START_FACTS = ("model", "parameters", "precision", "parallelism", "tokens_per_step", "samples_per_step")
"""Facts of the run that its start event carries too, so that events.jsonl can be read alone."""


class JsonLinesWriter:
    """Appends objects to one file. A line reaches the kernel in one ``write``, so that a kill loses no finished step."""

    def __init__(self, path: Path) -> None:
        """Open ``path``, cutting off what a kill left of a line: see ``cut_bytes``. Raises RunDirectoryError."""
        self._path = path
        self.cut_bytes = mend_last_line(path)
        with reported(path, what="cannot be opened for appending"):
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object. Raises RunDirectoryError, the file then still ends with a whole line."""
        data = encode_text(dumps_strict(row)) + b"\n"
        with reported(self._path, what="cannot be written"):
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError:
                self._take_back(written)
                raise

    def _take_back(self, written: int) -> None:
        """Remove the part of a line that was written, unless another process has appended after it."""
        with suppress(OSError):
            end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
            if written and end == os.fstat(self._descriptor).st_size:
                os.ftruncate(self._descriptor, end - written)

    def close(self) -> None:
        """Bring the lines to the disk and close. Raises RunDirectoryError."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor < 0:
            return
        with reported(self._path, what="cannot be brought to the disk"):
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


class RunLog(BaseObserver):
    """The run's memory. Essential: a run that cannot write down its steps must not go on."""

    essential = True

    def __init__(self, directory: RunDirectory) -> None:
        """Open the three files. Raises RunDirectoryError."""
        self._metrics = JsonLinesWriter(directory.metrics)
        self._events = JsonLinesWriter(directory.events)
        self._evaluation = JsonLinesWriter(directory.evaluation)
        self._facts: dict[str, Any] = {}
        self._warnings = [
            f"{path.name}: {writer.cut_bytes} bytes of an unfinished last line were cut off"
            for path, writer in (
                (directory.metrics, self._metrics),
                (directory.events, self._events),
                (directory.evaluation, self._evaluation),
            )
            if writer.cut_bytes
        ]

    def run_start(self, info: RunInfo) -> None:
        self._facts = {name: getattr(info, name) for name in _START_FACTS}

    def step_end(self, record: StepRecord) -> None:
        # A frozen dataclass without nested ones: its __dict__ is the row, in the order of the fields.
        self._metrics.write(record.__dict__)

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._evaluation.write(record.__dict__)

    def event(self, event: Event) -> None:
        if event.type == EventType.START:
            event = replace(event, fields=self._facts | event.fields)
        self._events.write(event_row(event))
        # Not before the start event, which opens each process's part of the file.
        warnings, self._warnings = self._warnings, []
        for message in warnings:
            self._events.write(event_row(replace(event, type=EventType.WARNING, fields={"message": message})))

    def close(self) -> None:
        """Bring everything to the disk. All three are closed, also when one fails."""
        with ExitStack() as stack:
            for writer in (self._metrics, self._events, self._evaluation):
                stack.callback(writer.close)
