"""How a node leaves that was asked to: by a plan of the coordinator, or on its own where none comes.

=======  ============================================  ==============================================
state    begins with                                   what the node does
=======  ============================================  ==============================================
present                                                it takes part
leaving  the first request to stop                     it says so, and waits for a plan without it
alone    no contact for a while, or its time is over   its workers save, if they must, and leave
=======  ============================================  ==============================================
"""

import time
from collections.abc import Callable

from evergrad_coordinator.protocol import Leaving
from evergrad_trainer.node.coordinator_link import Conversation
from evergrad_trainer.node.worker_group import WorkerGroup
from evergrad_trainer.worker import channel

_UNREACHABLE_SECONDS = 3.0
"""After so long without the coordinator a node that must go leaves on its own."""


class Departure:
    """Leads one node's workers out of the run."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        worker_group: Callable[[], WorkerGroup],
        log: Callable[[str], None],
        grace_seconds: float,
    ) -> None:
        """``log``: writes a line. ``grace_seconds``: from the request to leaving on its own."""
        self._conversation = conversation
        self._workers = worker_group
        self._log = log
        self._grace_seconds = grace_seconds
        self._since: float | None = None
        self.is_alone = False
        """Whether the workers leave without a plan of the coordinator."""

    def leave(self) -> None:
        """Ask the coordinator for a group without this node, unless that was done before."""
        if self._since is not None:
            return
        self._since = time.monotonic()
        # Said again on every new connection: the coordinator that has heard it may be gone.
        self._conversation.is_leaving = True
        # Without a coordinator and without a group no component can plan work for this node.
        if not self._conversation.send(Leaving()) and self._workers().place is None:
            self._workers().depart(None, save=True)
        self._log("was asked to leave")

    def tick(self, away_seconds: float) -> None:
        """Leave alone where no plan has come in time. ``away_seconds``: since the last contact."""
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
        if self._workers().place is None:
            self._workers().depart(None, save=True)
        else:
            # Workers leave their group at a step boundary first; they depart once they have said ready.
            self._workers().change(
                channel.WorkerPlan(channel.LOCAL_GENERATION, hard=False),
                cause="node_left",
                detail="preemption",
            )
