"""Passes rank 0's records on to the process that serves the node's metrics."""

import logging
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    RunInfo,
    StepRecord,
    record_row,
)
from evergrad_trainer.observers.base import BaseObserver, Observer
from evergrad_trainer.observers.events import event_row, parse_event_row
from evergrad_trainer.observers.history import read_before
from evergrad_trainer.run.directory import RunDirectory

_log = logging.getLogger(__name__)


class Relay(BaseObserver):
    """Observer on the sending side.

    ``send(kind, record)``: ``kind`` is the observer's method, and ``record`` its argument as JSON values.
    """

    def __init__(self, send: Callable[[str, dict[str, Any]], None]) -> None:
        self._send = send

    def run_start(self, info: RunInfo) -> None:
        # The receiver does not have the records from while rank 0 was on another node. Read them here, so
        # that the receiver need not wait for a slow volume.
        try:
            before = read_before(RunDirectory(Path(info.run_directory)))
            info = replace(
                info,
                highest_step=before.highest_step,
                last_time=before.last_time,
            )
        except (RunDirectoryError, VolumeError) as error:
            _log.warning("the metrics may count repeated steps as new ones: %s", error)
        # Send JSON values, because the receiver is another process, perhaps of another version.
        self._send("run_start", asdict(info))

    def step_end(self, record: StepRecord) -> None:
        self._send("step_end", record_row(record))

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._send("evaluation_end", record_row(record))

    def event(self, event: Event) -> None:
        self._send("event", event_row(event))


def deliver(observer: Observer, kind: str, record: dict[str, Any]) -> None:
    """Pass a received record to an observer, like a record of this process."""
    if kind == "run_start":
        observer.run_start(RunInfo(**record))
    elif kind == "step_end":
        observer.step_end(StepRecord(**record))
    elif kind == "evaluation_end":
        observer.evaluation_end(EvaluationRecord(**record))
    elif kind == "event":
        observer.event(parse_event_row(record))
