"""Measures the seconds of a step's phases, by the clock of the device that computes them.

On a CPU, work is complete when its call returns, so the host's clock measures it. Calls to an accelerator
only queue work. There, each phase ends with an event in the queue, which is read after the device has reached
it. No measurement ever waits.
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
    """Measures one step at a time. All time between ``begin`` and the last ``mark`` belongs to some phase."""

    def begin(self) -> None:
        """Begin a step."""

    def mark(self, phase: str) -> None:
        """End a phase. It began where the previous phase ended."""

    def busy_seconds(self) -> float:
        """Return the seconds of this step's phases data and forward_backward; the device must have finished
        both."""

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase: of this step on a CPU, of the previous step on an accelerator."""


@dataclass
class HostClock:
    """Measures a device whose work is complete when its call returns."""

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
    """A point in the queue of a device: the methods of ``torch.cuda.Event`` that are used here."""

    def record(self) -> None:
        """Append the event to the queue, after all work that was launched so far."""

    def query(self) -> bool:
        """Return whether the device has reached the event. Does not wait."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return milliseconds from this event to ``end_event``, of the same type. The device must have
        reached both."""


_Marks = list[tuple[str, DeviceEvent]]


class DeviceClock:
    """Measures a device that runs asynchronously, by events in its queue.

    If the host waits for data while the device still has work, no time passes between the two events, so the
    wait is not counted.
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
        # Only record the event, without reading it, so that the host continues to launch work.
        event.record()
        self._marks.append((phase, event))

    def busy_seconds(self) -> float:
        phases = _read(self._marks)
        return phases["data"] + phases["forward_backward"]

    def seconds(self) -> dict[str, float]:
        # This step's update is only launched so far. The next step reads its events, after that step's own
        # wait for the device.
        return _read(self._marks_before)


def _read(marks: _Marks) -> dict[str, float]:
    """Return seconds by phase, or zeros if the device has not reached all of ``marks``: reading would
    wait."""
    phases = dict.fromkeys(PHASES, 0.0)
    if not marks or not marks[-1][1].query():
        return phases
    for (_, begun), (phase, ended) in itertools.pairwise(marks):
        phases[phase] += begun.elapsed_time(ended) / _MILLISECONDS
    return phases


def build_clock(device: torch.device) -> PhaseClock:
    """Return the clock for computations on ``device``."""
    if device.type == "cuda":
        return DeviceClock(functools.partial(torch.cuda.Event, enable_timing=True))
    return HostClock()
