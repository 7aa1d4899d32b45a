"""Duties of rank 0: one process writes the run's records, and passes the duties on with the rank."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

from evergrad_common.causes import read_change
from evergrad_trainer.base.records import EventType
from evergrad_trainer.observers.base import BaseObserver, Observer
from evergrad_trainer.observers.build import Surroundings, build_observers
from evergrad_trainer.observers.history import last_step
from evergrad_trainer.observers.stateful_observers import Together
from evergrad_trainer.training.build import Machinery
from evergrad_trainer.worker.channel import WorkerGo
from evergrad_trainer.worker.run_records import describe_run
from evergrad_trainer.worker.session import Session


class Writer:
    """Takes and releases rank 0's duties. While this process has the duties, ``session.observers`` writes
    records; otherwise it writes nothing."""

    def __init__(self, session: Session, *, relay: Observer | None) -> None:
        """``relay``: receives the records instead of a metrics endpoint of this process."""
        self._session = session
        self._relay = relay
        self._own: Observer = BaseObserver()
        self.is_on_duty = False

    def take(self) -> bool:
        """Take the duties; return whether this process did not have them before."""
        if self.is_on_duty:
            return False
        session = self._session
        built = build_observers(
            Surroundings(
                session.directory,
                run=session.plan.run.metadata.name,
                training=session.plan.run.training,
                base_directory=session.plan.base_directory,
                stream=sys.stdout,
                should_stop=session.is_signalled,
                relay=self._relay,
            )
        )
        session.observers = Together(built.observers, session.opened.observers)
        session.metrics_address = built.metrics_address
        self._own = built.observers
        self.is_on_duty = True
        return True

    def release(self) -> None:
        """Release the duties, because another process takes them or nothing is left to write."""
        if not self.is_on_duty:
            self._session.waiting = None
            return
        # For example, the world broke before its start was announced.
        self._session.release_events()
        self.is_on_duty = False
        self._session.observers.close()
        self._session.observers = self._session.opened.observers

    def announce_world(
        self, machinery: Machinery, begin: WorkerGo, *, is_new: bool
    ) -> None:
        """Record that training continues in another world. ``is_new``: this process was not rank 0 before."""
        session, last = self._session, self._session.progress.last_record
        if is_new:
            session.observers.run_start(
                replace(describe_run(session, machinery), takes_over=True)
            )
        session.release_events()
        if last is not None and last_step(session.directory) < last.step:
            # The process that should have written this row is gone, or was one step behind. A task's
            # observers have received it on every rank that holds its state, but what they reported about it
            # was not recorded.
            self._own.step_end(last)
            session.opened.observers.repeat(last)
        fields: dict[str, Any] = {
            "world_size": session.world.size,
            "from_world_size": last.world_size if last is not None else None,
            "cause": read_change(begin.cause),
            "detail": begin.detail,
            "paused_seconds": max(0.0, time.time() - last.time)
            if last is not None
            else None,
            "pid": os.getpid(),
        }
        session.emit(EventType.WORLD, fields)
