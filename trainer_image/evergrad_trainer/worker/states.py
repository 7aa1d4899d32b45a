"""The states of a worker's life, and of the model state that it holds.

A worker whose world is never replaced goes through the same states, with one world: its only order is
"begin", and the next one it takes is the end that this world has agreed on. A failed peer or a difference
then ends the worker (FAILED), since its launcher starts all of them afresh.

::

    IDLE ──begin──▶ SETUP ──met──▶ SETTLE ──one state──▶ TRAIN ──end agreed──▶ CLOSING
     ▲ │              └───────────────┴───────────────────┤                       │
     │ │                      lost, diverged              │ change                │
     │ │                            ▼                     ▼                       │
     │ │                        GIVING_UP              LEAVING ◀──────────────────┘
     │ │                            └─────────┬───────────┘
     │ └──end──▶ ENDED ◀──saved── DEPARTING   │
     └────────────────── out of the group ────┘

==========  =================================================  =============================
state       event                                              next state
==========  =================================================  =============================
IDLE        begin: all members are ready                       SETUP
IDLE        leave: this worker leaves the run                  DEPARTING
IDLE        end: the run is over                               ENDED
SETUP       all members have met                               SETTLE
SETUP       a member did not come, or was lost                 GIVING_UP
SETTLE      all hold the state after one step                  TRAIN
SETTLE      a member was lost, or what was transferred differs GIVING_UP
TRAIN       the ranks agree to go on in another world          LEAVING
TRAIN       the ranks agree that the run stops                 CLOSING
TRAIN       a member was lost, or replicas differ              GIVING_UP
CLOSING     the state is saved, the end is written down        LEAVING
CLOSING     a member was lost during the last save             GIVING_UP
LEAVING     the group is taken down                            IDLE
GIVING_UP   connections are cut, the group is taken down       IDLE
DEPARTING   the state is saved where nobody else holds it      ENDED
any         an error that no other world cures                 FAILED
==========  =================================================  =============================

IDLE answers every planned change with ``ready``: see ``worker.watchdog``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evergrad_trainer.worker.channel import Failed, WorkerLeft


class WorkerState(StrEnum):
    """Where a worker is between its first world and its end."""

    IDLE = "idle"
    """Out of every group; waits for an order."""
    SETUP = "setup"
    """Meets the other members."""
    SETTLE = "settle"
    """Brings all members to one state."""
    TRAIN = "train"
    CLOSING = "closing"
    """Saves together with the others, and writes the run's end down."""
    LEAVING = "leaving"
    """Takes down a group that has ended as agreed."""
    GIVING_UP = "giving_up"
    """Takes down a group whose peers are gone or differ; waits for none of them."""
    DEPARTING = "departing"
    """Leaves the run alone."""
    ENDED = "ended"
    FAILED = "failed"
    """Ends because of an error that is not of one world."""


class StateStatus(StrEnum):
    """The condition of the tensors of a worker."""

    WHOLE = "whole"
    """The state after ``progress.finished_steps``: may be transferred to others and saved."""
    FRESH = "fresh"
    """The initial weights and zero moments, as they were built from the seed."""
    DIRTY = "dirty"
    """Anything else: transferred or loaded in part, built without weights, or found to differ.

    Never trained, transferred or saved.
    """


_OVER = frozenset({WorkerState.ENDED, WorkerState.FAILED})
_NEXT: Mapping[WorkerState, frozenset[WorkerState]] = {
    WorkerState.IDLE: frozenset(
        {WorkerState.SETUP, WorkerState.DEPARTING, WorkerState.ENDED}
    ),
    WorkerState.SETUP: frozenset({WorkerState.SETTLE, WorkerState.GIVING_UP}),
    WorkerState.SETTLE: frozenset({WorkerState.TRAIN, WorkerState.GIVING_UP}),
    WorkerState.TRAIN: frozenset(
        {WorkerState.LEAVING, WorkerState.CLOSING, WorkerState.GIVING_UP}
    ),
    WorkerState.CLOSING: frozenset({WorkerState.LEAVING, WorkerState.GIVING_UP}),
    WorkerState.LEAVING: frozenset({WorkerState.IDLE}),
    WorkerState.GIVING_UP: frozenset({WorkerState.IDLE}),
    WorkerState.DEPARTING: frozenset({WorkerState.ENDED}),
    WorkerState.ENDED: frozenset(),
    WorkerState.FAILED: frozenset(),
}


class Life:
    """A worker's phase, and the state it holds. The main thread alone writes it."""

    def __init__(self, held: StateStatus) -> None:
        self.phase = WorkerState.IDLE
        self.held = held

    @property
    def is_over(self) -> bool:
        """Whether it has ended, well or not: an error after that ends it no more."""
        return self.phase in _OVER

    def enter(self, phase: WorkerState) -> None:
        """Continue with ``phase``.

        Raises RuntimeError for a step the table does not have: an error of this program.
        """
        is_error = phase is WorkerState.FAILED and not self.is_over
        if not is_error and phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a worker's life cannot go from {self.phase} to {phase}")
        self.phase = phase


@dataclass(frozen=True)
class LifeEnd:
    """How a worker's life ended: the exit code of its process, and its last words to the supervisor if it has
    any."""

    exit_code: int
    last_words: WorkerLeft | Failed | None = None
