"""The states of a worker, and of the model state that it holds.

A worker whose world is never replaced passes through the same states with one world. Its only order is
"begin", and the next order is the end on which this world has agreed. A failed peer or a difference then ends
the worker (FAILED), because its launcher starts all workers again.
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
SETUP       all members are connected                          SETTLE
SETUP       a member did not connect, or was lost              GIVING_UP
SETTLE      all members hold the state after the same step     TRAIN
SETTLE      a member was lost, or a transferred state differs  GIVING_UP
TRAIN       the ranks agree to continue in another world       LEAVING
TRAIN       the ranks agree that the run stops                 CLOSING
TRAIN       a member was lost, or replicas differ              GIVING_UP
CLOSING     the state is saved, and the end is recorded        LEAVING
CLOSING     a member was lost during the last save             GIVING_UP
LEAVING     the group is torn down                             IDLE
GIVING_UP   connections are cut, the group is torn down        IDLE
DEPARTING   the state is saved, if no other worker holds it    ENDED
any         an error that occurs in every world                FAILED
==========  =================================================  =============================

IDLE answers every planned change with ``ready``: see ``worker.watchdog``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from evergrad_trainer.worker.channel import Failed, WorkerLeft


class WorkerState(StrEnum):
    """The stage of a worker between its first world and its end."""

    IDLE = "idle"
    """In no group; waits for an order."""
    SETUP = "setup"
    """Connects to the other members."""
    SETTLE = "settle"
    """Gives all members the same state."""
    TRAIN = "train"
    CLOSING = "closing"
    """Saves together with the other members, and records the run's end."""
    LEAVING = "leaving"
    """Tears down a group that has ended as agreed."""
    GIVING_UP = "giving_up"
    """Tears down a group whose peers are gone or differ, without waiting for them."""
    DEPARTING = "departing"
    """Leaves the run alone."""
    ENDED = "ended"
    FAILED = "failed"
    """Ends because of an error that does not depend on the world."""


class StateStatus(StrEnum):
    """The condition of a worker's tensors."""

    WHOLE = "whole"
    """The state after ``progress.finished_steps``; it may be transferred and saved."""
    FRESH = "fresh"
    """The initial weights and zero moments, built from the seed."""
    DIRTY = "dirty"
    """Any other condition: partly transferred or loaded, built without weights, or found to differ.

    Such tensors are never trained, transferred or saved.
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
    """A worker's phase, and the condition of its state. Only the main thread writes it."""

    def __init__(self, held: StateStatus) -> None:
        self.phase = WorkerState.IDLE
        self.held = held

    @property
    def is_over(self) -> bool:
        """Whether the worker has ended, successfully or not; a later error does not change this."""
        return self.phase in _OVER

    def enter(self, phase: WorkerState) -> None:
        """Continue with ``phase``.

        Raises RuntimeError for a transition that is not in the table, which is a programming error.
        """
        is_error = phase is WorkerState.FAILED and not self.is_over
        if not is_error and phase not in _NEXT[self.phase]:
            raise RuntimeError(f"a worker's life cannot go from {self.phase} to {phase}")
        self.phase = phase


@dataclass(frozen=True)
class LifeEnd:
    """How a worker ended: the exit code of its process, and its last message to the supervisor, if any."""

    exit_code: int
    last_words: WorkerLeft | Failed | None = None
