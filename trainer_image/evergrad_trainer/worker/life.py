"""The states of a worker's life, and of the model state that it holds.

::

    IDLE ──begin──▶ SETUP ──all met──▶ SETTLE ──one state──▶ TRAIN
     ▲ │              │                   │                    │
     │ │              └────────────── lost, diverged, change, or the run's end
     │ │                                  ▼
     │ └──finish, depart──▶ ENDED      LEAVING
     └──────── out of the group ──────────┘

IDLE answers every planned change with ``ready``: see ``worker.guard``. An error in any other state ends the life.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evergrad_trainer.worker.channel import Failed, Saved


class Phase(StrEnum):
    """Where a worker is between its first world and its end."""

    IDLE = "idle"
    """Out of every group; waits for an order."""
    SETUP = "setup"
    """Meets the other members."""
    SETTLE = "settle"
    """Brings all members to one state."""
    TRAIN = "train"
    LEAVING = "leaving"
    """Takes the group down, whatever has become of it."""
    ENDED = "ended"


class Held(StrEnum):
    """What the tensors of a worker are."""

    WHOLE = "whole"
    """The state after ``progress.finished_steps``: may be fed to others and saved."""
    FRESH = "fresh"
    """The initial weights and zero moments, as they were built from the seed."""
    DIRTY = "dirty"
    """Anything else: fed or loaded in part, built without weights, or found to differ. Never trained, fed or saved."""


_NEXT: Mapping[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.SETUP, Phase.ENDED}),
    Phase.SETUP: frozenset({Phase.SETTLE, Phase.LEAVING, Phase.ENDED}),
    Phase.SETTLE: frozenset({Phase.TRAIN, Phase.LEAVING, Phase.ENDED}),
    Phase.TRAIN: frozenset({Phase.LEAVING, Phase.ENDED}),
    Phase.LEAVING: frozenset({Phase.IDLE, Phase.ENDED}),
    Phase.ENDED: frozenset(),
}


class Life:
    """A worker's phase, and the state it holds. The main thread alone writes it."""

    def __init__(self, held: Held) -> None:
        self.phase = Phase.IDLE
        self.held = held

    def enter(self, phase: Phase) -> None:
        """Go on to ``phase``. Raises RuntimeError for a step the table does not have: an error of this program."""
        if phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a worker's life cannot go from {self.phase} to {phase}")
        self.phase = phase


@dataclass(frozen=True)
class End:
    """How a worker's life ended: the exit code of its process, and its last words to the supervisor if it has any."""

    exit_code: int
    last_words: Saved | Failed | None = None
