"""Seconds of a step's phases, on the clock of the device that computes them.

A CPU has done what a call returns from, so that the host's clock measures it. An accelerator is only given
orders: there an event is recorded in its queue at the end of each phase, and read when the device is past
it. Nothing ever waits for a measurement.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

PHASES = ("data", "forward_backward", "communication", "optimizer")
_MILLISECONDS = 1000.0


class PhaseClock(Protocol):
    """Measures one step after the other; every moment between ``begin`` and the last ``mark`` belongs to a
    phase."""

    def begin(self) -> None:
        """Begin a step."""

    def mark(self, phase: str) -> None:
        """End a phase: it began where the one before it ended."""

    def busy_seconds(self) -> float:
        """Seconds of this step's data and forward_backward, which the device must have run."""

    def seconds(self) -> dict[str, float]:
        """Seconds by phase: of this step on a CPU, of the step before it on an accelerator."""


@dataclass
class HostClock:
    """Measures a device that is done with whatever the host has returned from."""

    now: Callable[[], float] = time.perf_counter
    _phases: dict[str, float] = field(default_factory=dict)
    _last: float = 0.0

    def begin(self) -> None:
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._last = self.now()

    def mark(self, phase: str) -> None:
        now = self.now()
        self._phases[phase] += now - self._last
        self._last = now

    def busy_seconds(self) -> float:
        return self._phases["data"] + self._phases["forward_backward"]

    def seconds(self) -> dict[str, float]:
        return dict(self._phases)


class DeviceEvent(Protocol):
    """A moment in the queue of a device: what is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Put it behind everything that was launched so far."""

    def query(self) -> bool:
        """Whether the device is past it; does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event`` of the same kind; the device must be past both."""


_Marks = list[tuple[str, DeviceEvent]]


class DeviceClock:
    """Measures a device that runs behind the host, by events in its queue.

    A wait for data costs a device nothing while it still has work, and then no time lies between the events.
    """

    def __init__(self, make_event: Callable[[], DeviceEvent]) -> None:
        self._make_event = make_event
        self._marks: _Marks = []
        self._marks_before: _Marks = []

    def begin(self) -> None:
        self._marks_before, self._marks = self._marks, []
        self.mark("")

    def mark(self, phase: str) -> None:
        event = self._make_event()
        # Recorded, and not looked at: the host continues to launch.
        event.record()
        self._marks.append((phase, event))

    def busy_seconds(self) -> float:
        phases = _read(self._marks)
        return phases["data"] + phases["forward_backward"]

    def seconds(self) -> dict[str, float]:
        # This step's update was only launched: its events are read in the next step, whose own wait for the
        # device comes behind them.
        return _read(self._marks_before)


def _read(marks: _Marks) -> dict[str, float]:
    """Seconds by phase; zeros where the device is not past all of ``marks``, since reading would wait."""
    phases = dict.fromkeys(PHASES, 0.0)
    if not marks or not marks[-1][1].query():
        return phases
    for (_, begun), (phase, ended) in itertools.pairwise(marks):
        phases[phase] += begun.elapsed_time(ended) / _MILLISECONDS
    return phases


def build_clock(device: torch.device) -> PhaseClock:
    """Choose the clock of what is computed on ``device``."""
    if device.type == "cuda":
        return DeviceClock(functools.partial(torch.cuda.Event, enable_timing=True))
    return HostClock()
