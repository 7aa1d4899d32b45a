"""Whether a run has recovered from a disturbance, as its coordinator reports it."""

import time
from typing import Any

from evergrad_chaos.nodes import DisturbedNodes
from evergrad_chaos.tally import ChaosTally
from evergrad_trainer.node.local import LocalCoordinator

PATIENCE_SECONDS = 300.0
"""A run that has not recovered by then hangs; it is not disturbed any more, so that one can look at it."""
_ENOUGH_STEPS = 3
"""Different steps that have to be reported: the first may have been trained before the disturbance."""


class Recovery:
    """Watches the run after each disturbance, and knows which nodes hold its newest state."""

    def __init__(
        self, coordinator: LocalCoordinator, nodes: DisturbedNodes, tally: ChaosTally
    ) -> None:
        self._coordinator = coordinator
        self._nodes = nodes
        self._tally = tally
        self._steps: set[int] = set()
        self.began = time.monotonic()
        self.needs_generation = 0
        """Least generation that trains again; 0 where the group may be the same one."""
        self.whole: set[int] = set()
        """Process ids of nodes that hold the newest state, as far as is known."""

    def begin(self, now: float) -> None:
        """The next disturbance happens now."""
        self.began, self._steps, self.needs_generation = now, set(), 0
        self.look()

    def expect_generation(self, victims: set[int]) -> None:
        """Wait for a new generation: without one no member of the group can be lost."""
        if victims & self.whole:
            self.needs_generation = self._tally.generation + 1

    def look(self) -> dict[str, Any] | None:
        """The coordinator's status; None while it is away."""
        status = self._coordinator.fetch_status() if self._coordinator.is_running else None
        if status is not None:
            self._tally.note_status(status)
        return status

    def is_complete(self, status: dict[str, Any], *, awaits_all: bool) -> bool:
        """Whether steps are reported again, and not only such as were done before the disturbance: a newer
        generation's, or the third."""
        if (
            status["phase"] != "Running"
            or status["generation"] < self.needs_generation
            or status["step"] is None
        ):
            return False
        self._steps.add(int(status["step"]))

        # Nodes that the coordinator takes for members, and that this process has not seen end.
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
