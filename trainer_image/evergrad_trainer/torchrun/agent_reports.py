"""Converts reports of a torchrun agent's workers to messages for the coordinator. ``now`` is an argument."""

import logging
from collections.abc import Mapping

from evergrad.report_values import read_values
from evergrad_common.step_rate import Pace
from evergrad_coordinator.protocol import Boundary, Message, Progress

_log = logging.getLogger(__name__)


class WorkerReports:
    """The newest report of one generation, and the part of it that has not been sent yet."""

    def __init__(self) -> None:
        self._generation = 0
        self._values: dict[str, int | float] = {}
        self._warned: set[str] = set()
        """Names of values that were left out before."""
        self._is_new = False
        self._pace = Pace()
        """Pace of this generation's reports."""
        self._checkpoint_step = -1
        """Newest checkpoint of any generation."""

    def begin(self, generation: int) -> None:
        """Reset, because the workers of ``generation`` are started."""
        self._generation = generation
        self._values = {}
        self._is_new = False
        self._pace = Pace()

    @property
    def step(self) -> int:
        """Step of the newest report; -1 before the first."""
        return int(self._values.get("step", -1))

    def take(
        self,
        report: Mapping[str, object],
        *,
        now: float,
    ) -> list[Message]:
        """Record a worker's report. Only reports of the world's rank 0 count.

        Returns the messages that must be sent immediately, for a new checkpoint.
        """
        # A worker of an older group may still be ending, and other ranks know only a part of the world's
        # loss.
        if report.get("generation") != self._generation or report.get("rank", 0) != 0:
            return []
        found, left_out = read_values(report)
        for name in [one for one in left_out if one not in self._warned]:
            self._warned.add(name)
            _log.warning("a script's report has %s", left_out[name])
        self._values |= found
        self._is_new = self._is_new or bool(found)
        if "step" in found:
            self._pace.note(self.step, now=now)
        checkpoint_step = int(found.get("checkpoint_step", -1))
        if checkpoint_step <= self._checkpoint_step:
            return []
        self._checkpoint_step = checkpoint_step
        # Send the progress first: a checkpoint after the last reported step would look like an error.
        return [*self.flush(now=now), Boundary(self._generation, checkpoint_step)]

    def flush(self, *, now: float) -> list[Message]:
        """Return the progress, if there is any that was not returned before."""
        if not self._is_new or not self._pace.has_begun:
            return []
        self._is_new = False
        values = self._values
        total_steps = None if (total := values.get("total_steps")) is None else int(total)
        return [
            Progress(
                self._generation,
                step=self.step,
                total_steps=total_steps,
                loss=values.get("loss"),
                tokens_per_second=values.get("tokens_per_second"),
                eta_seconds=self._pace.remaining_seconds(self.step, total_steps, now=now),
                checkpoint_step=int(values["checkpoint_step"])
                if "checkpoint_step" in values
                else None,
            )
        ]
