"""Sends progress from a node to the coordinator, at most twice a second. Only the newest report is kept."""

import time
from collections.abc import Callable
from typing import Any

from evergrad_coordinator.protocol import Boundary, Message, Progress
from evergrad_trainer.base.records import EventType
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.observers.events import parse_event_row, saved_step

PROGRESS_SECONDS = 0.5
"""Shortest time between two reports that are not forced by ``flush``."""


class ProgressSender:
    """Holds the newest progress until ``send`` accepts it.

    ``send`` returns true if the message was sent or can never be sent, and false if it must be sent again.
    """

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._unsent: Progress | None = None
        self._sent_at = 0.0
        self._checkpoint_step = -1
        """Step of the newest checkpoint that was reported to the coordinator."""

    def note(self, progress: Progress) -> None:
        """Keep ``progress`` as the newest report, and send it if the last report is at least 0.5 s old."""
        self._unsent = progress
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Send the report that is waiting, if the last report is at least 0.5 s old."""
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send the report that is waiting without a delay.

        Otherwise the coordinator would keep an older step if the run ends or no further report follows.
        """
        if self._unsent is not None and self._send(self._unsent):
            self._unsent, self._sent_at = None, time.monotonic()

    def note_checkpoint(self, generation: int, step: int) -> None:
        """Report a new checkpoint, for which joins wait; ignore a checkpoint that was reported before."""
        if step <= self._checkpoint_step:
            return
        # Send the progress first: a checkpoint newer than the last reported step would look like an error.
        self.flush()
        if self._send(Boundary(generation, step)):
            self._checkpoint_step = step


class RecordReader:
    """Passes workers' records to the node's metrics, and the progress in them to the coordinator."""

    def __init__(self, metrics: NodeMetrics, sender: ProgressSender) -> None:
        self._metrics = metrics
        self._sender = sender

    def take_record(self, kind: str, record: dict[str, Any]) -> None:
        """Process a record of rank 0; ``kind`` is the name of an observer's method."""
        self._metrics.tell(kind, record)
        progress = self._metrics.progress
        if progress is None:
            return
        self._sender.note(progress)
        if kind == "event" and record.get("type") == EventType.SAVE:
            self._sender.note_checkpoint(
                progress.generation, saved_step(parse_event_row(record))
            )

    def take_report(self, report: dict[str, object]) -> None:
        """Process a report of a script, whose values may have any type.

        Only the report of the world's rank 0 counts as progress of the run.
        """
        progress = self._metrics.report(report)
        if progress is None:
            return
        self._sender.note(progress)
        if progress.checkpoint_step is not None:
            self._sender.note_checkpoint(progress.generation, progress.checkpoint_step)
