"""Decides how long a node waits for one of its workers before it replaces the worker as frozen or stuck."""

import time
from collections.abc import Collection

from evergrad_trainer.node.workers import Worker

PING_SECONDS = 0.5
FROZEN_SECONDS = 10.0
"""A worker is killed and replaced as frozen if its watchdog thread has not answered for this time."""
STUCK_SECONDS = 10.0
"""Time that a worker has to leave an abandoned group, or three of its longest slots if that is longer.

A slot lasts until its device has run it, because an accelerator's queue is emptied before the worker leaves
the group. If no slot has ended yet, or the worker may be the only holder of the state, the worker has at
least the timeout of its collectives.
"""

FIRST_RANK_SECONDS = 3.0
"""Additional time for rank 0. Otherwise all workers that are stuck in one group would be killed together,
with every copy of the state. When the others are gone, the coordinator reports to the node of rank 0 that it
is the only holder of the state."""


class WorkerTimeouts:
    """Decides which workers to kill, from the times of their last answers and of the last hard change."""

    def __init__(self, *, timeout_seconds: float) -> None:
        """``timeout_seconds`` is the timeout of the workers' collectives."""
        self._timeout_seconds = timeout_seconds
        self._last_check = time.monotonic()
        self.asked_at = 0.0

    def check_clock(self, now: float, workers: Collection[Worker]) -> None:
        """Restart the time limits of all workers if this process itself was suspended.

        In this case a missing answer does not mean that a worker is frozen.
        """
        if now - self._last_check > 4 * PING_SECONDS:
            for worker in workers:
                worker.last_heard = worker.started_at = now
            self.asked_at = now
        self._last_check = now

    def why_kill(
        self, worker: Worker, now: float, *, is_asked: bool, is_only_holder: bool
    ) -> str | None:
        """Return why a worker must be replaced, or None if it need not be.

        ``is_asked``: whether the worker must leave its group because of a hard change and has not answered
        yet. ``is_only_holder``: whether no other node holds a state.
        """
        if now - worker.last_heard > FROZEN_SECONDS:
            return "is frozen"
        if not is_asked:
            return None
        # Allow the time that the worker's current slot may take, even if no slot has been measured yet.
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
