"""Observer of rank 0 that shows the run in one tracker. It is switched off if the tracker's library fails or
hangs."""

import time
from collections.abc import Callable
from typing import Final, NoReturn

from evergrad_manifest.training import Tracker
from evergrad_trainer.base.records import (
    EvaluationRecord,
    Event,
    EventType,
    RunInfo,
    StepRecord,
)
from evergrad_trainer.observers.base import BaseObserver, GivesUp
from evergrad_trainer.observers.trackers.feeder import (
    Feeder,
    Item,
    Opener,
    Saved,
    TrackerFinish,
)
from evergrad_trainer.observers.trackers.interface import CLOSING_SECONDS, End
from evergrad_trainer.run.directory import RunDirectory

HANG_SECONDS: Final = 360.0
"""Longest time that a library may take to open, or for one record. MLflow's client retries a request for four
minutes, so that a restart of its server within this time does not switch the tracker off."""

_ENDS: Final[dict[object, End]] = {"complete": "complete", "signal": "interrupted"}
"""How the run ends, by the reason of a stop. After any other reason, the newest step's evaluations are
complete."""
_LATER: Final = "the next start of the run shows what is missing"


class TrackerTimeouts:
    """The time that all trackers of a process together have at its end."""

    def __init__(
        self, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = CLOSING_SECONDS if seconds is None else seconds
        self._clock = clock
        self._until: float | None = None

    def begin(self) -> None:
        """Reset the timer, because the run continues."""
        self._until = None

    def left(self) -> float:
        """Return the remaining seconds. The time starts with the first call."""
        if self._until is None:
            self._until = self._clock() + self._seconds
        return max(0.0, self._until - self._clock())


class TrackerObserver(BaseObserver):
    """Passes records to a feeder. Its calls do not wait, except at the end of the run or the process."""

    def __init__(
        self,
        settings: Tracker,
        open_library: Opener,
        directory: RunDirectory,
        *,
        patience: TrackerTimeouts,
    ) -> None:
        self._settings = settings
        self._open_library = open_library
        self._directory = directory
        self._patience = patience
        self._feeder: Feeder | None = None

    def run_start(self, info: RunInfo) -> None:
        self._patience.begin()
        if self._feeder is None:
            self._feeder = Feeder(self._settings, self._open_library, self._directory)
        self._give(info)

    def step_end(self, record: StepRecord) -> None:
        self._give(record)

    def evaluation_end(self, record: EvaluationRecord) -> None:
        self._give(record)

    def event(self, event: Event) -> None:
        if event.type == EventType.SAVE:
            self._give(Saved(str(event.fields.get("checkpoint", ""))))
        elif event.type == EventType.STOP:
            self._finish(_ENDS.get(event.fields.get("reason"), "stopped"))
        elif event.type == EventType.FAILED:
            self._finish("failed")

    def close(self) -> None:
        feeder, self._feeder = self._feeder, None
        if feeder is None:
            return
        # Pass the run on without an end, because another process may continue it.
        if feeder.give(TrackerFinish("handed on")):
            feeder.wait(self._patience.left())
        feeder.abandon()

    def _give(self, item: Item) -> None:
        feeder = self._feeder
        if feeder is None:
            return
        self._raise_if_lost(feeder)
        if not feeder.give(item):
            self._lose(feeder, "takes records more slowly than they come")

    def _finish(self, end: End) -> None:
        feeder = self._feeder
        if feeder is None:
            return
        self._raise_if_lost(feeder)
        is_given = feeder.give(TrackerFinish(end))
        if not (is_given and feeder.wait(self._patience.left())):
            self._lose(
                feeder, f"has not taken the last records within {CLOSING_SECONDS:g} s"
            )
        self._raise_if_lost(feeder)
        self._feeder = None

    def _raise_if_lost(self, feeder: Feeder) -> None:
        if feeder.failure is not None:
            self._lose(feeder, f"failed, {feeder.failure}")
        if feeder.busy_seconds > HANG_SECONDS:
            self._lose(feeder, f"has not answered for {HANG_SECONDS:g} s")

    def _lose(self, feeder: Feeder, why: str) -> NoReturn:
        # Do not wait for the thread any longer. It writes nothing after its library responds.
        feeder.abandon()
        self._feeder = None
        raise GivesUp(f"{self._settings.type} {why}; {_LATER}")
