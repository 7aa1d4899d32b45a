"""Thread that reads the supervisor's orders while the main thread is inside a collective.

::

    IDLE --ready--> (begin) --> in a group --change or error--> leaving --> IDLE

The main thread calls :meth:`Watchdog.await_order` when it is out of every group, :meth:`enter` before it sets
one up, :meth:`note_formed` when its members have met and :meth:`leave` when it has taken it down. A hard
change in between makes this thread cut the group's connections until ``leave``.

Connections are the group's if they were opened between ``enter`` and ``note_formed``: gloo opens all of them
there, and no others later. A socket that anybody else in this process opens before or after, such as a
plug-in that reports to a service, is never cut.
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
"""Between two cuts while the main thread is still inside: it may open connections after the first."""

Order = WorkerGo | WorkerLeave | WorkerFinish


class Watchdog:
    """Reads the channel to the supervisor; its end ends this process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._changed = threading.Condition()
        self._newest = WorkerPlan(generation=-1, hard=False)
        self._patient_until = float("inf")
        self._order: Order | None = None
        self._inside: int | None = None
        self._interrupt: Interrupt | None = None
        self._outside_sockets: frozenset[int] = frozenset()
        """Connections that were there before the group's, by inode."""
        self._group_sockets: frozenset[int] | None = None
        """The group's connections; None until it has formed."""
        self._thread = threading.Thread(
            target=self._listen, name="evergrad-watchdog", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def is_changing(self) -> bool:
        """Whether the running group is to be left at the next step boundary."""
        return self._inside is not None and self._newest.generation > self._inside

    def can_wait(self) -> bool:
        """Whether it may go on for the sake of a save in flight: not for long, however often the plan is made
        again."""
        return time.monotonic() < self._patient_until

    def saves_first(self) -> bool:
        """Whether the group is to save its state before it is left."""
        return self.is_changing() and self._newest.saves and not self._newest.hard

    def is_changing_from(self, generation: int) -> bool:
        """Whether a newer generation than that is planned, or the run is over."""
        return self._newest.generation > generation or isinstance(
            self._order, WorkerFinish | WorkerLeave
        )

    def await_order(self, *, step: int) -> Order:
        """Answer each planned change with ``ready``, from outside of every group, until an order comes.

        ``step``: the newest whose state this process holds.
        """
        answered = -1
        with self._changed:
            while True:
                # An order for an older generation than the newest plan is out of date: its peers have left.
                order = self._order
                if isinstance(order, WorkerFinish) or (
                    order is not None and order.generation >= self._newest.generation
                ):
                    self._order = None
                    return order
                if self._newest.generation > answered:
                    answered = self._newest.generation
                    self._channel.send(WorkerReady(answered, step))
                # Woken by the thread for each record, and by nothing else.
                self._changed.wait()

    def enter(self, generation: int, interrupt: Interrupt) -> None:
        """Begin to guard the group of ``generation``, before it is set up.

        ``interrupt`` is set if the group must be left at once.
        """
        with self._changed:
            self._outside_sockets, self._group_sockets = connected_sockets(), None
            self._inside, self._interrupt = generation, interrupt
            if self._newest.generation <= generation:
                self._patient_until = float("inf")
            # The change came between the order to begin and this call.
            if self._newest.hard and self._newest.generation > generation:
                interrupt.set()

    def note_formed(self) -> None:
        """Note that the members have met: connections that are opened from here on are not the group's."""
        with self._changed:
            self._group_sockets = connected_sockets() - self._outside_sockets

    def cut(self) -> None:
        """Give the running group up from this side: peers must not wait for this process."""
        with self._changed:
            if self._interrupt is not None:
                self._interrupt.set()
            if self._inside is not None:
                self._cut_group()

    def leave(self) -> None:
        """The group is taken down; from here on nothing of this process is cut."""
        with self._changed:
            self._inside = self._interrupt = None

    def _listen(self) -> None:
        try:
            while True:
                record = self._channel.receive(_CUT_SECONDS if self._is_cutting() else None)
                with self._changed:
                    # Answered here, so that a long step is not taken for a dead process.
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
            # The earliest of all: a plan that is made repeatedly must not be put off for ever.
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
        # While the group forms, its connections are known by nothing but being new.
        cut_sockets(connected_sockets() - self._outside_sockets if group is None else group)

    def _is_cutting(self) -> bool:
        return self._interrupt is not None and self._interrupt.is_set
