"""Progress on its way from a node to the coordinator: the newest is told, not too often, and nothing is kept that cannot be."""

import time
from collections.abc import Callable

from evergrad_coordinator.protocol import Boundary, Message, Progress

PROGRESS_SECONDS = 0.5
"""Shortest time between two reports."""


class ProgressSender:
    """Holds the newest progress until ``send`` takes it: ``send`` says whether the message is on its way, or hopeless."""

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
        self.flush()
        if self._send(Boundary(generation, step)):
            self._checkpoint_step = step
