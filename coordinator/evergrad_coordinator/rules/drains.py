"""Nodes that were asked to go: which one saves first, and what has been saved that way. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from evergrad_coordinator.rules.state import Key, Node


@dataclass
class Departures:
    """The leaving node that saves for all, if there is one, and what has been saved that way."""

    saver: Key | None = None
    saving_generation: int = 0
    """The newest number when the saver was told to save: the one its save may be published under."""
    saved_step: int = -1
    was_left: bool = False
    """The last node to go had been asked to."""

    def may_commit(self, node: Node, generation: int) -> bool:
        """Whether this is the saver's own save."""
        return node.key == self.saver and generation == self.saving_generation

    def is_awaited(self, members: Iterable[Node]) -> bool:
        """Whether ``members`` can only begin with what the saver is saving."""
        # A member that holds a state hands it on; without one all would load an older checkpoint.
        return self.saver is not None and not any(
            node.step is not None and node.step >= 0 for node in members
        )

    def note_saved(self, node: Node) -> None:
        """Note that the saver has left, and that what it held is saved."""
        self.saved_step = max(self.saved_step, node.step if node.step is not None else -1)

    def note_gone(self, node: Node) -> None:
        """Note that a node is not connected any more."""
        # Saved or not, nobody is waited for now; another leaver may be chosen.
        if self.saver == node.key:
            self.saver = None
