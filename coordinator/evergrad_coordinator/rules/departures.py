"""Nodes that were asked to go: when each of them may, and which one saves first. Pure; a part of ``membership``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from evergrad_coordinator.protocol import Leave
from evergrad_coordinator.rules import planning
from evergrad_coordinator.rules.state import Key, Node

if TYPE_CHECKING:
    from evergrad_coordinator.rules.membership import Membership


@dataclass
class Departures:
    """The leaving node that saves for all, if there is one, and what has been saved that way."""

    saver: Key | None = None
    saved_step: int = -1
    was_left: bool = False
    """The last node to go had been asked to."""
    _saving_generation: int = 0

    def release(self, group: Membership, now: float, *, staying: list[Node] | None) -> None:
        """Let leavers go that are in no group. ``staying``: who goes on; None for a group that runs, which holds the state."""
        leavers = [
            node
            for node in group.nodes.values()
            if node.is_leaving and node.released_at is None and node.group == 0
        ]
        if staying is not None and self.saver is None and group.settings.recovery == "in-process":
            saver = planning.choose_saver(leavers, staying=staying, saved_step=self.saved_step)
            if saver is not None:
                self.saver, self._saving_generation = saver.key, group.generation
        for node in leavers:
            node.released_at = now
            is_saver = node.key == self.saver  # also when it comes back after its connection was lost
            group.send(node.peer, Leave(group.generation, save=is_saver))
            group.log("leave", node=node.name, save=is_saver)

    def may_commit(self, node: Node, generation: int) -> bool:
        """Whether it is the saver's own save."""
        return node.key == self.saver and generation == self._saving_generation

    def is_awaited(self, members: Iterable[Node]) -> bool:
        """Whether ``members`` can only begin with what the saver is saving."""
        return self.saver is not None and not any(
            node.step is not None and node.step >= 0 for node in members
        )

    def note_saved(self, node: Node) -> None:
        """The saver has left, and what it held is saved."""
        self.saved_step = max(self.saved_step, node.step if node.step is not None else -1)

    def note_gone(self, node: Node) -> None:
        """A node is not connected any more."""
        if self.saver == node.key:
            self.saver = None
