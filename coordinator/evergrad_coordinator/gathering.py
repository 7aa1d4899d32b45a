"""How long nodes are waited for before a first plan: at the start, after a restart, and after all connections were lost. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from evergrad_coordinator.state import Node, Settings


@dataclass
class Gathering:
    """``adopts_until``: a group may be running unseen; until then its nodes can report it, and nothing is planned against it."""

    adopts_until: float | None
    first_seen: float | None = None
    """First candidate."""

    def ends_at(self, nodes: Iterable[Node], settings: Settings) -> float:
        """When plans may be made: -inf for now, infinity if only an event can end the wait."""
        nodes = list(nodes)
        num_candidates = sum(node.is_candidate for node in nodes)
        if self.adopts_until is not None:
            # However many strangers are here: the old group may still train out of sight.
            is_useful = num_candidates >= settings.min_nodes or any(node.is_leaving or node.group for node in nodes)
            return self.adopts_until if is_useful else float("inf")
        if num_candidates >= settings.expect or any(node.group for node in nodes):
            return float("-inf")
        if num_candidates < settings.min_nodes or self.first_seen is None:
            return float("inf")
        return self.first_seen + settings.start_wait_seconds
