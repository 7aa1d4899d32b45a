"""Progress on its way from a node to the coordinator: the newest is told, not too often, and nothing is kept
that cannot be."""

import time
from collections.abc import Callable
from typing import Any

from evergrad_coordinator.protocol import Boundary, Message, Progress
from evergrad_trainer.base.records import EventType
from evergrad_trainer.node.metrics import NodeMetrics
from evergrad_trainer.observers.events import parse_event_row, saved_step

PROGRESS_SECONDS = 0.5
"""Shortest time between two reports."""


class ProgressSender:
    """Holds the newest progress until ``send`` takes it: ``send`` says whether the message is on its way, or
    hopeless."""

    def __init__(self, send: Callable[[Message], bool]) -> None:
        self._send = send
        self._unsent: Progress | None = None
        self._sent_at = 0.0
        self._checkpoint_step = -1
        """Newest checkpoint that the coordinator was told of."""

    def note(self, progress: Progress) -> None:
        """Send it, unless the last one was sent a moment ago."""
        self._unsent = progress
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Send what a moment ago was too early for."""
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Send now: an end, or a time without a further report, must not leave the run at an older step."""
        if self._unsent is not None and self._send(self._unsent):
            self._unsent, self._sent_at = None, time.monotonic()

    def note_checkpoint(self, generation: int, step: int) -> None:
        """Joins wait for a new checkpoint: one that is named again in a later report is none."""
        if step <= self._checkpoint_step:
            return
        # In order: a checkpoint above the last step that was reported would look like a mistake.
        self.flush()
        if self._send(Boundary(generation, step)):
            self._checkpoint_step = step


class RecordReader:
    """Reads what workers say of their training: the node's metrics get all of it, the coordinator the
    progress in it."""

    def __init__(self, metrics: NodeMetrics, sender: ProgressSender) -> None:
        self._metrics = metrics
        self._sender = sender

    def take_record(self, kind: str, record: dict[str, Any]) -> None:
        """A record of rank 0; ``kind`` names an observer's method."""
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
        """A script's own report, in whatever values; only the world's rank 0 speaks for the run."""
        progress = self._metrics.report(report)
        if progress is None:
            return
        self._sender.note(progress)
        if progress.checkpoint_step is not None:
            self._sender.note_checkpoint(progress.generation, progress.checkpoint_step)
