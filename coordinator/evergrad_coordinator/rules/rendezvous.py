"""Decides how long a first plan waits for nodes, and how long joining nodes wait for a checkpoint. Pure.

A first plan is made at the start, after a restart of the coordinator, and after the loss of all connections.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from evergrad_coordinator.protocol import Commit
from evergrad_coordinator.rules.state import GroupSettings, Node


@dataclass
class Rendezvous:
    """A wait for nodes before a first plan.

    ``adopts_until``: time until which nodes can report a group that is running unseen. No plan is made before
    it. It is None if no group can be running.
    """

    adopts_until: float | None
    first_seen: float | None = None
    """Time at which the first candidate connected."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """Newest ``commit`` of each connection. They are answered when the adoption is decided."""

    def ends_at(self, nodes: Iterable[Node], settings: GroupSettings) -> float:
        """Return the time from which plans may be made.

        It is -inf if plans may be made now, and infinity if only an event can end the wait.
        """
        nodes = list(nodes)
        num_candidates = sum(node.is_candidate for node in nodes)
        if self.adopts_until is not None:
            # Wait even if enough new nodes are connected, because the old group may still be training.
            is_useful = num_candidates >= settings.min_nodes or any(
                node.is_leaving or node.group for node in nodes
            )
            return self.adopts_until if is_useful else float("inf")
        # If a node is already in a group, do not wait: it has waited before, and cannot train now.
        if num_candidates >= settings.expect or any(node.group for node in nodes):
            return float("-inf")
        if num_candidates < settings.min_nodes or self.first_seen is None:
            return float("inf")
        return self.first_seen + settings.start_wait_seconds


@dataclass
class JoinHold:
    """The wait of nodes that join a group of fresh workers, until the next checkpoint."""

    since: float | None = None
    """Time since which the first of these nodes waits; None if no node waits."""
    has_boundary: bool = False
    """Whether a checkpoint has been completed since then."""

    def ends_at(self, settings: GroupSettings, *, now: float) -> float:
        """Return the end of the wait. It is ``now`` or earlier if the nodes may join."""
        # Only a checkpoint after the arrival counts: steps since an older checkpoint would be trained again.
        if self.since is None:
            self.since, self.has_boundary = now, False
        return (
            self.since if self.has_boundary else self.since + settings.longest_hold_seconds
        )
