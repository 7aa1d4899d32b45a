"""How long nodes are waited for before a first plan, and nodes that join before they may. Pure.

A first plan is made at the start, after a restart of the coordinator, and after all connections were lost.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from evergrad_coordinator.protocol import Commit
from evergrad_coordinator.rules.state import GroupSettings, Node


@dataclass
class Rendezvous:
    """A wait for nodes before a first plan.

    ``adopts_until``: a group may be running unseen; until then its nodes can report it, and nothing is
    planned against it. None: no group can be running.
    """

    adopts_until: float | None
    first_seen: float | None = None
    """When the first candidate came."""
    commits: dict[int, Commit] = field(default_factory=dict)
    """Questions by connection, the newest of each: answered once it is known whose group runs."""

    def ends_at(self, nodes: Iterable[Node], settings: GroupSettings) -> float:
        """When plans may be made: -inf for now, infinity if only an event can end the wait."""
        nodes = list(nodes)
        num_candidates = sum(node.is_candidate for node in nodes)
        if self.adopts_until is not None:
            # However many strangers are here: the old group may still train out of sight.
            is_useful = num_candidates >= settings.min_nodes or any(
                node.is_leaving or node.group for node in nodes
            )
            return self.adopts_until if is_useful else float("inf")
        # A node that is in a group has waited already, and trains on nothing meanwhile.
        if num_candidates >= settings.expect or any(node.group for node in nodes):
            return float("-inf")
        if num_candidates < settings.min_nodes or self.first_seen is None:
            return float("inf")
        return self.first_seen + settings.start_wait_seconds


@dataclass
class JoinHold:
    """Nodes that would join a group of fresh workers wait for a checkpoint that is made after they came."""

    since: float | None = None
    """The first of them is here; None while nobody waits."""
    has_boundary: bool = False
    """A checkpoint stands since then."""

    def ends_at(self, settings: GroupSettings, *, now: float) -> float:
        """Until when they wait; ``now`` or earlier if they do not any more."""
        # Only a checkpoint after the join counts: the steps since an older one would be trained again.
        if self.since is None:
            self.since, self.has_boundary = now, False
        return (
            self.since if self.has_boundary else self.since + settings.longest_hold_seconds
        )
