"""Decides from the coordinator's status whether a run has recovered from a disturbance."""

import time
from typing import Any

from evergrad_chaos.nodes import DisturbedNodes
from evergrad_chaos.tally import ChaosTally
from evergrad_trainer.node.local import LocalCoordinator

PATIENCE_SECONDS = 300.0
"""A run that has not recovered within this time hangs. It is not disturbed further, so that you can examine
it."""
_ENOUGH_STEPS = 3
"""Number of different steps that must be reported; the first may have been trained before the disturbance."""


class Recovery:
    """Watches the run after each disturbance, and records which nodes hold its newest state."""

    def __init__(
        self, coordinator: LocalCoordinator, nodes: DisturbedNodes, tally: ChaosTally
    ) -> None:
        self._coordinator = coordinator
        self._nodes = nodes
        self._tally = tally
        self._steps: set[int] = set()
        self.began = time.monotonic()
        self.needs_generation = 0
        """Lowest generation that counts as recovered; 0 if the group may stay the same."""
        self.whole: set[int] = set()
        """Process ids of the nodes that held the newest state at the last recovery, without later victims."""

    def begin(self, now: float) -> None:
        """Begin to watch for the recovery from a disturbance at the time ``now``."""
        self.began, self._steps, self.needs_generation = now, set(), 0
        self.look()

    def expect_generation(self, victims: set[int]) -> None:
        """Wait for a new generation: without one no member of the group can be lost."""
        if victims & self.whole:
            self.needs_generation = self._tally.generation + 1

    def look(self) -> dict[str, Any] | None:
        """Return the coordinator's status, or None if the coordinator does not run or answer."""
        status = self._coordinator.fetch_status() if self._coordinator.is_running else None
        if status is not None:
            self._tally.note_status(status)
        return status

    def is_complete(self, status: dict[str, Any], *, awaits_all: bool) -> bool:
        """Return whether the run has reported steps that it trained after the disturbance.

        It has if two different steps of a newer generation, or three different steps, were reported.
        """
        if (
            status["phase"] != "Running"
            or status["generation"] < self.needs_generation
            or status["step"] is None
        ):
            return False
        self._steps.add(int(status["step"]))

        # Count the nodes that the coordinator reports as running members and whose processes still run.
        alive = self._nodes.alive()
        running = [
            alive[int(one["node"])]
            for one in status["nodes"]["members"]
            if one["state"] == "running" and int(one["node"]) in alive
        ]
        if awaits_all:
            most = min(len(alive), int(status["nodes"]["max"]))
            is_whole = len(running) == most and len(alive) == len(self._nodes.nodes)
        else:
            is_whole = len(running) >= min(2, self._nodes.num_nodes)
        enough = _ENOUGH_STEPS - 1 if self.needs_generation else _ENOUGH_STEPS
        if not is_whole or len(self._steps) < enough:
            return False
        self.whole = set(running)
        return True
