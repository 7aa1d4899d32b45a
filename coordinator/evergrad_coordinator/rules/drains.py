"""Tracks the leaving node that saves the state before it goes. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from evergrad_coordinator.rules.state import Key, Node


@dataclass
class Departures:
    """The leaving node that saves the newest state, if there is one, and the step that was saved this way."""

    saver: Key | None = None
    saving_generation: int = 0
    """Newest generation when the saver was asked to save. Its save may be published under this number."""
    saved_step: int = -1
    was_left: bool = False
    """Whether the last node that disconnected had been asked to leave."""

    def may_commit(self, node: Node, generation: int) -> bool:
        """Return whether this is the saver's own save."""
        return node.key == self.saver and generation == self.saving_generation

    def is_awaited(self, members: Iterable[Node]) -> bool:
        """Return whether ``members`` must wait for the state that the saver is saving."""
        # A member that holds a state transfers it. Without such a member, all would load an older checkpoint.
        return self.saver is not None and not any(
            node.step is not None and node.step >= 0 for node in members
        )

    def note_saved(self, node: Node) -> None:
        """Record that the saver has left and has saved its state."""
        self.saved_step = max(self.saved_step, node.step if node.step is not None else -1)

    def note_gone(self, node: Node) -> None:
        """Record that a node is no longer connected."""
        # Do not wait for the saver any longer, even if it has not saved. Another leaving node may be chosen.
        if self.saver == node.key:
            self.saver = None
