"""Drains a node that was requested to leave: by a plan of the coordinator, or alone if no plan arrives.

=======  ============================================  ==============================================
state    begins with                                   what the node does
=======  ============================================  ==============================================
present                                                takes part
leaving  the first request to stop                     reports so, and waits for a plan without it
alone    no contact for 3 s, or its grace has ended    its workers save if necessary, and leave
=======  ============================================  ==============================================
"""

import time
from collections.abc import Callable

from evergrad_coordinator.protocol import Leaving
from evergrad_trainer.node.coordinator_link import Conversation
from evergrad_trainer.node.worker_group import WorkerGroup
from evergrad_trainer.worker import channel

_UNREACHABLE_SECONDS = 3.0
"""A leaving node that has had no contact with the coordinator for this time leaves alone."""


class Departure:
    """Drains the workers of one node from the run."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        log: Callable[[str], None],
        grace_seconds: float,
    ) -> None:
        """Prepare the drain.

        ``log`` writes a line. ``grace_seconds`` is the time from the request to stop until the node leaves
        alone.
        """
        self._conversation = conversation
        self._log = log
        self._grace_seconds = grace_seconds
        self._since: float | None = None
        self.is_alone = False
        """Whether the workers leave without a plan of the coordinator."""

    def leave(self, workers: WorkerGroup) -> None:
        """Request a group without this node from the coordinator; later calls do nothing."""
        if self._since is not None:
            return
        self._since = time.monotonic()
        # Send the request on every new connection: the coordinator that received it may have restarted.
        self._conversation.is_leaving = True
        # Without a coordinator and without a group no component can plan work for this node.
        if not self._conversation.send(Leaving()) and workers.place is None:
            workers.depart(None, save=True)
        self._log("was asked to leave")

    def tick(self, workers: WorkerGroup, away_seconds: float) -> None:
        """Leave alone if no plan has arrived in time.

        ``away_seconds`` is the time since the last contact with the coordinator.
        """
        if self._since is None or self.is_alone:
            return
        waited = time.monotonic() - self._since
        is_cut_off = (
            not self._conversation.is_connected
            and min(away_seconds, waited) > _UNREACHABLE_SECONDS
        )
        if not is_cut_off and waited <= self._grace_seconds:
            return
        self.is_alone = True
        if workers.place is None:
            workers.depart(None, save=True)
        else:
            # Workers first leave their group at a step boundary; they depart after they have reported ready.
            workers.change(
                channel.WorkerPlan(channel.LOCAL_GENERATION, hard=False),
                cause="node_left",
                detail="preemption",
            )
