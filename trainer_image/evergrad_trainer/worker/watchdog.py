"""The thread that reads the supervisor's orders while the main thread is inside a collective.

::

    IDLE --ready--> (begin) --> in a group --change or error--> leaving --> IDLE

The main thread calls :meth:`Watchdog.await_order` when it is in no group, :meth:`enter` before it sets up a
group, :meth:`note_formed` when all members have connected, and :meth:`leave` after the teardown of the group.
If a hard change arrives in between, this thread cuts the group's connections until ``leave`` is called.

A connection belongs to the group if it was opened between ``enter`` and ``note_formed``: gloo opens all its
connections then, and none later. Sockets that other code in this process opens before or after, for example
a plug-in that reports to a service, are never cut.
"""

import logging
import os
import threading
import time

from evergrad_common.contract import ExitCode
from evergrad_trainer.distributed.world import Interrupt
from evergrad_trainer.worker.channel import (
    Channel,
    WorkerFinish,
    WorkerGo,
    WorkerLeave,
    WorkerPing,
    WorkerPlan,
    WorkerPong,
    WorkerReady,
)
from evergrad_trainer.worker.sockets import connected_sockets, cut_sockets

_log = logging.getLogger(__name__)
_CUT_SECONDS = 0.02
"""Seconds between two cuts while the main thread is in the group, because it may open further connections."""

Order = WorkerGo | WorkerLeave | WorkerFinish


class Watchdog:
    """Reads the channel to the supervisor, and ends this process if the channel is closed."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._newest = WorkerPlan(generation=-1, hard=False)
        self._patient_until = float("inf")
        self._order: Order | None = None
        self._inside: int | None = None
        self._interrupt: Interrupt | None = None
        self._outside_sockets: frozenset[int] = frozenset()
        """Inodes of the connections that were open before the group was set up."""
        self._group_sockets: frozenset[int] | None = None
        """Inodes of the group's connections; None until the group has formed."""
        self._thread = threading.Thread(
            target=self._listen, name="evergrad-watchdog", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def is_changing(self) -> bool:
        """Return whether this process must leave the running group at the next step boundary."""
        return self._inside is not None and self._newest.generation > self._inside

    def can_wait(self) -> bool:
        """Return whether the group may continue until a save in flight is complete.

        The time is bounded by the earliest deadline of all plans, so repeated plans do not extend it.
        """
        return time.monotonic() < self._patient_until

    def saves_first(self) -> bool:
        """Return whether the group must save its state before its members leave it."""
        return self.is_changing() and self._newest.saves and not self._newest.hard

    def is_changing_from(self, generation: int) -> bool:
        """Return whether a generation newer than ``generation`` is planned, or the run is over."""
        return self._newest.generation > generation or isinstance(
            self._order, WorkerFinish | WorkerLeave
        )

    def await_order(self, *, step: int) -> Order:
        """Answer each planned change with ``ready`` until an order arrives, and return the order.

        Call this only while the process is in no group. ``step`` is the newest step whose state this process
        holds.
        """
        answered = -1
        with self._changed:
            while True:
                # Ignore an order for a generation older than the newest plan: its peers have left.
                order = self._order
                if isinstance(order, WorkerFinish) or (
                    order is not None and order.generation >= self._newest.generation
                ):
                    self._order = None
                    return order
                if self._newest.generation > answered:
                    answered = self._newest.generation
                    self._channel.send(WorkerReady(answered, step))
                # Only the watchdog thread wakes this wait, once for each record.
                self._changed.wait()

    def enter(self, generation: int, interrupt: Interrupt) -> None:
        """Begin to guard the group of ``generation``; call this before the group is set up.

        ``interrupt`` is set if this process must leave the group without waiting for a step boundary.
        """
        with self._changed:
            self._outside_sockets, self._group_sockets = connected_sockets(), None
            self._inside, self._interrupt = generation, interrupt
            if self._newest.generation <= generation:
                self._patient_until = float("inf")
            # A hard change can arrive between the order to begin and this call.
            if self._newest.hard and self._newest.generation > generation:
                interrupt.set()

    def note_formed(self) -> None:
        """Record that all members have connected; connections opened later do not belong to the group."""
        with self._changed:
            self._group_sockets = connected_sockets() - self._outside_sockets

    def cut(self) -> None:
        """Abandon the running group, so that its peers do not wait for this process."""
        with self._changed:
            if self._interrupt is not None:
                self._interrupt.set()
            if self._inside is not None:
                self._cut_group()

    def leave(self) -> None:
        """Record that the group is torn down; no connection of this process is cut from now on."""
        with self._changed:
            self._inside = self._interrupt = None

    def _listen(self) -> None:
        try:
            while True:
                record = self._channel.receive(_CUT_SECONDS if self._is_cutting() else None)
                with self._changed:
                    # Answer in this thread, so that a long step does not look like a dead process.
                    if isinstance(record, WorkerPing):
                        self._channel.send(WorkerPong())
                    elif isinstance(record, WorkerPlan):
                        self._note(record)
                    elif isinstance(record, WorkerGo | WorkerLeave | WorkerFinish):
                        self._order = record
                        if isinstance(record, WorkerFinish) and self._interrupt is not None:
                            self._interrupt.set()
                    self._changed.notify_all()
                    if self._is_cutting():
                        # Under the lock: after ``leave`` a new connection may be the next group's.
                        self._cut_group()
        except EOFError:
            # Without a supervisor no change of the group arrives; its peers continue without this process.
            os._exit(int(ExitCode.INTERNAL))
        except Exception:  # noqa: BLE001 - no code joins this thread, and a worker that takes no orders is worse than one that is gone
            _log.exception("the watchdog thread has failed; the worker ends")
            os._exit(int(ExitCode.INTERNAL))

    def _note(self, change: WorkerPlan) -> None:
        if change.generation > self._newest.generation or (
            change.generation == self._newest.generation and change.hard
        ):
            self._newest = change
            # Keep the earliest deadline: otherwise repeated plans would postpone the change without limit.
            self._patient_until = min(
                self._patient_until, time.monotonic() + change.patience_seconds
            )
        if (
            change.hard
            and self._interrupt is not None
            and self._inside is not None
            and change.generation > self._inside
        ):
            self._interrupt.set()

    def _cut_group(self) -> None:
        group = self._group_sockets
        # While the group forms, every connection opened since ``enter`` counts as a connection of the group.
        cut_sockets(connected_sockets() - self._outside_sockets if group is None else group)

    def _is_cutting(self) -> bool:
        return self._interrupt is not None and self._interrupt.is_set
