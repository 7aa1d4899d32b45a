"""Writes metrics.jsonl, events.jsonl and evaluation.jsonl: one strict JSON object a line, in the file when
the call returns."""

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
"""Lines that wait for a volume: tens of thousands of steps, days of a large model."""
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause between two tries to write what waits."""
CLOSING_SECONDS = 2.0
"""How long the end of a process waits for the volume: whoever asked it to stop may kill next."""

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
"""Facts of the run that its start event carries too, so that events.jsonl can be read alone."""


class JsonLinesWriter:
    """Writer that appends objects to one file. A line reaches the kernel in one ``write``, so that a kill
    loses no finished step.

    While the volume is away or full, lines wait in memory, and are written in their order later: training
    needs nothing of them.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open ``path``, cutting off what a kill left of a line: see ``cut_bytes``.

        Raises RunDirectoryError or VolumeError.
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
        """Append one object, now or later. Raises VolumeError when more waits than memory should hold.

        The file ends with a whole line in either case.
        """
        data = encode_text(dumps_strict(row)) + b"\n"
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        # While the volume is away, a try at every step would slow the training down.
        if (
            self._pause
            and self._clock() < self._next_try
            and self._waiting_bytes <= LONGEST_WAITING_BYTES
        ):
            return
        try:
            self._write_waiting()
        except (OSError, VolumeError, RunDirectoryError) as error:
            # Memory is for the training: rather an end that is understood than one by the kernel.
            if self._waiting_bytes > LONGEST_WAITING_BYTES:
                what = f"{len(self._waiting)} lines wait to be written"
                remedy = "Free some space, raise the quota, or check the volume's server, and start again"
                problem = Problem(str(self._path), what, str(error), remedy)
                raise VolumeError(str(problem)) from error
            if not self._pause:
                _log.warning(
                    "%s: cannot be written: %s; its lines wait in memory", self._path, error
                )
            # Twice as long each time: a volume that is away for an hour is asked a hundred times, not
            # thousands.
            self._pause = min(
                max(FIRST_PAUSE_SECONDS, 2 * self._pause), LONGEST_PAUSE_SECONDS
            )
            self._next_try = self._clock() + self._pause

    def _write_waiting(self) -> None:
        if self._pause:
            # A handle that went stale stays stale, and another process may have appended meanwhile.
            self._close_descriptor()
            mend_last_line(self._path)
        # The file may have been closed by a try that failed.
        if self._descriptor < 0:
            self._descriptor = self._open()
        while self._waiting:
            data, written = self._waiting[0], 0
            try:
                while written < len(data):
                    written += os.write(self._descriptor, data[written:])
            except OSError:
                # Half a line would join the next one; another process may have appended after it, though.
                with suppress(OSError):
                    end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
                    if written and end == os.fstat(self._descriptor).st_size:
                        os.ftruncate(self._descriptor, end - written)
                raise
            # A line leaves the queue once it is written whole: a failure leaves it for the next try.
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
        """Bring the lines to the disk and close. Raises VolumeError where lines still wait for it in vain."""
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

        # A short wait only: whoever asked this process to stop may kill it next.
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

    Essential: a run that can no longer keep its steps, not even in memory, must not go on.
    """

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
        # Unknown values are left out.
        known = {"flops_per_step": info.flops_per_step, "peak_flops": info.peak_flops}
        self._facts |= {name: value for name, value in known.items() if value is not None}
        if info.metrics:
            # Events of a recipe without metrics of its own are what they were before there were any.
            self._facts["metrics"] = info.metrics
        if info.loss_items != TOKENS:
            self._facts["loss_items"] = info.loss_items

    def step_end(self, record: StepRecord) -> None:
        self._metrics.write(record_row(record))

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._evaluation.write(record_row(record))

    def event(self, event: Event) -> None:
        # With the run's facts, so that events.jsonl can be read alone.
        if event.type == EventType.START:
            event = replace(event, fields=self._facts | event.fields)
        self._events.write(event_row(event))
        # Not before the start event, which opens each process's part of the file.
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
        """Bring everything to the disk. All three are closed, also when one fails."""
        # A stack runs all of them, and raises the last error once each is closed.
        with ExitStack() as stack:
            for writer in (self._metrics, self._events, self._evaluation):
                stack.callback(writer.close)
