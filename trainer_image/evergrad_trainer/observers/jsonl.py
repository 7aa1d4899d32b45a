"""Writes metrics.jsonl, events.jsonl and evaluation.jsonl: one strict JSON object per line, which is in the
file when the call returns."""

import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.base.records import (
    TOKENS,
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
    record_row,
)
from evergrad_trainer.base.volume import retry, volume_error
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import event_row
from evergrad_trainer.run.directory import (
    RunDirectory,
    dumps_strict,
    encode_text,
    mend_last_line,
    reported,
)

LONGEST_WAITING_BYTES = 16 * 2**20
"""Maximum size of lines that wait for a volume: tens of thousands of steps, or days of a large model."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
"""Maximum pause between two attempts to write the waiting lines."""
CLOSING_SECONDS = 2.0
"""Maximum time that the end of a process waits for the volume, because the process may be killed next."""

_log = logging.getLogger(__name__)

_START_FACTS = (
    "model",
    "parameters",
    "trainable_parameters",
    "precision",
    "parallelism",
    "tokens_per_step",
    "samples_per_step",
)
"""Facts of the run that its start event also contains, so that events.jsonl can be read alone."""


class JsonLinesWriter:
    """Writer that appends objects to one file. Each line is written with one ``write`` call, so that a kill
    does not lose a finished step.

    While the volume is unreachable or full, lines wait in memory and are written in order later, because
    training does not read them.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``path`` and remove an unfinished last line that a kill left; ``cut_bytes`` is its length.

        Raises RunDirectoryError or VolumeError if the file cannot be opened.
        """
        self._path = path
        self._clock = clock
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._pause = 0.0
        self._next_try = 0.0
        self._is_closed = False
        self.cut_bytes = mend_last_line(path)
        self._descriptor = self._open()

    def _open(self) -> int:
        with reported(self._path, what="cannot be opened for appending"):
            return os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644
            )

    def write(self, row: dict[str, Any]) -> None:
        """Append one object, now or later. Raises VolumeError if more than LONGEST_WAITING_BYTES wait.

        In both cases the file ends with a complete line.
        """
        data = encode_text(dumps_strict(row)) + b"\n"
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        # While the volume is unreachable, an attempt at every step would slow down the training.
        if (
            self._pause
            and self._clock() < self._next_try
            and self._waiting_bytes <= LONGEST_WAITING_BYTES
        ):
            return
        try:
            self._write_waiting()
        except (OSError, VolumeError, RunDirectoryError) as error:
            # Limit the memory: a clear error is better than an out-of-memory kill.
            if self._waiting_bytes > LONGEST_WAITING_BYTES:
                what = f"{len(self._waiting)} lines wait to be written"
                remedy = "Free some space, raise the quota, or check the volume's server, and start again"
                problem = Problem(str(self._path), what, str(error), remedy)
                raise VolumeError(str(problem)) from error
            if not self._pause:
                _log.warning(
                    "%s: cannot be written: %s; its lines wait in memory", self._path, error
                )
            # Double the pause each time, so that an outage of an hour causes about a hundred attempts, not
            # thousands.
            self._pause = min(
                max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS
            )
            self._next_try = self._clock() + self._pause

    def _write_waiting(self) -> None:
        if self._pause:
            # A stale file handle does not recover, and another process may have appended in the meantime.
            self._close_descriptor()
            mend_last_line(self._path)
        # A failed attempt may have closed the file.
        if self._descriptor < 0:
            self._descriptor = self._open()
        while self._waiting:
            data, written = self._waiting[0], 0
            try:
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError:
                # Remove the partial line, which would join the next line, unless another process has appended
                # after it.
                with suppress(OSError):
                    end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
                    if written and end == os.fstat(self._descriptor).st_size:
                        os.ftruncate(self._descriptor, end - written)
                raise
            # Remove a line from the queue only after it is written completely, so that failures are retried.
            self._waiting_bytes -= len(self._waiting.popleft())
        if self._pause:
            _log.warning("%s: is written again", self._path)
            self._pause = 0.0

    def _close_descriptor(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with suppress(OSError):
                os.close(descriptor)

    def close(self) -> None:
        """Write the lines to the disk and close. Raises VolumeError if waiting lines cannot be written."""
        if self._is_closed:
            return
        self._is_closed = True

        def finish() -> None:
            try:
                if self._waiting or self._descriptor < 0:
                    self._write_waiting()
                os.fsync(self._descriptor)
            except OSError:
                self._pause = self._pause or FIRST_PAUSE_SECONDS
                raise

        # Wait only briefly, because a stopped process may be killed next.
        try:
            retry(
                finish,
                where=self._path,
                what="cannot be brought to the disk",
                patience_seconds=CLOSING_SECONDS,
            )
        except OSError as error:
            raise volume_error(
                error, self._path, "cannot be brought to the disk"
            ) from error
        finally:
            self._close_descriptor()


class RunLog(BaseObserver):
    """Writer of the run's records.

    Essential: a run that cannot record its steps, not even in memory, must not continue.
    """

    essential = True

    def __init__(self, directory: RunDirectory) -> None:
        """Open the three files. Raises RunDirectoryError or VolumeError if a file cannot be opened."""
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
        # Leave out unknown values.
        known = {"flops_per_step": info.flops_per_step, "peak_flops": info.peak_flops}
        self._facts |= {name: value for name, value in known.items() if value is not None}
        if info.metrics:
            # Without metrics, leave the key out, so that events are the same as those of older versions.
            self._facts["metrics"] = info.metrics
        if info.loss_items != TOKENS:
            self._facts["loss_items"] = info.loss_items

    def step_end(self, record: StepRecord) -> None:
        self._metrics.write(record_row(record))

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._evaluation.write(record_row(record))

    def event(self, event: Event) -> None:
        # Add the run's facts, so that events.jsonl can be read alone.
        if event.type == EventType.START:
            event = replace(event, fields=self._facts | event.fields)
        self._events.write(event_row(event))
        # Write warnings after the start event, with which each process's part of the file begins.
        warnings, self._warnings = self._warnings, []
        for message in warnings:
            self._events.write(
                event_row(
                    replace(
                        event,
                        type=EventType.WARNING,
                        fields={"message": message},
                    )
                )
            )

    def close(self) -> None:
        """Write all lines to the disk. All three files are closed, even if one fails."""
        # The stack closes all writers, and then raises the last error.
        with ExitStack() as stack:
            for writer in (self._metrics, self._events, self._evaluation):
                stack.callback(writer.close)
