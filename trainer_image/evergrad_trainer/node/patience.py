"""How long a node waits for a worker of its own before it takes it for frozen or stuck and replaces it."""

import time
from collections.abc import Collection

from evergrad_trainer.node.workers import Worker

PING_SECONDS = 0.5
FROZEN_SECONDS = 10.0
"""A worker whose watchdog thread has not answered for so long is frozen: it is killed and replaced."""
STUCK_SECONDS = 10.0
"""At least this long a worker may take to leave a group that is given up; three of its longest slots if that
is longer.

A slot lasts until its device has run it: an accelerator's queue is emptied before the group is left. Where no
slot has ended yet, or the worker may be the last that holds the state, the timeout of its operations is the
bound.
"""

FIRST_RANK_SECONDS = 3.0
"""Rank 0 may take this much longer: workers that are stuck in one group would all be killed at once, with
every copy of the state. When the others are gone, the node of rank 0 is told that it holds the last one."""


class WorkerTimeouts:
    """Judges workers by when they were heard last, and by when they were asked to leave a group
    that is gone."""

    def __init__(self, *, timeout_seconds: float) -> None:
        """``timeout_seconds``: of the workers' collectives."""
        self._timeout_seconds = timeout_seconds
        self._last_check = time.monotonic()
        self.asked_at = 0.0

    def check_clock(self, now: float, workers: Collection[Worker]) -> None:
        """If this process stood still itself, silence says nothing about the others: all of them
        begin again."""
        if now - self._last_check > 4 * PING_SECONDS:
            for worker in workers:
                worker.last_heard = worker.started_at = now
            self.asked_at = now
        self._last_check = now

    def why_kill(
        self, worker: Worker, now: float, *, is_asked: bool, is_only_holder: bool
    ) -> str | None:
        """Name what is wrong with a worker that must be replaced.

        ``is_asked``: to leave at once, and it has not answered yet.
        """
        if now - worker.last_heard > FROZEN_SECONDS:
            return "is frozen"
        if not is_asked:
            return None
        # As long as its work may take, also if that time is not known yet.
        patience = max(STUCK_SECONDS, 3 * worker.heartbeat.longest_slot_seconds)
        if worker.rank == 0:
            patience += FIRST_RANK_SECONDS
        if is_only_holder or worker.heartbeat.is_in_first_slot:
            patience = max(patience, self._timeout_seconds)
        return (
            "does not leave a group that is gone"
            if now - self.asked_at > patience
            else None
        )
