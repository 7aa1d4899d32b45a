"""Phases are measured by the device that computes them: by the host on a CPU, by events in the queue of an
accelerator."""

from itertools import count

import pytest
import torch

from evergrad_trainer.training.phase_clock import (
    DeviceClock,
    DeviceEvent,
    HostClock,
    build_clock,
)


class FakeDevice:
    """Runs its work in order, while the host continues."""

    def __init__(self) -> None:
        self.now = 100.0
        self.is_free_at = 0.0

    def launch(self, seconds: float) -> None:
        self.is_free_at = max(self.now, self.is_free_at) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.is_free_at)

    def make_event(self) -> "FakeEvent":
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at = float("inf")

    def record(self) -> None:
        self.at = max(self._device.now, self._device.is_free_at)

    def query(self) -> bool:
        return self.at <= self._device.now

    def elapsed_time(self, end_event: DeviceEvent) -> float:
        assert isinstance(end_event, FakeEvent)
        # torch raises here: reading would have to wait.
        assert self.query() and end_event.query()
        return (end_event.at - self.at) * 1000.0


def run_step(
    clock: DeviceClock, device: FakeDevice, *, reading: float, computing: float
) -> float:
    """One step of two slots, and the clock's values after the device has finished it."""
    clock.begin()
    for _ in range(2):
        device.now += reading
        clock.mark("data")
        device.launch(computing)
        clock.mark("forward_backward")
    device.launch(0.5)
    device.wait()
    busy = clock.busy_seconds()
    device.now += 0.25
    clock.mark("communication")
    device.launch(2.0)
    clock.mark("optimizer")
    return busy


def test_the_phases_of_an_accelerator_step_are_measured_on_the_device_one_step_later() -> (
    None
):
    device = FakeDevice()
    clock = DeviceClock(device.make_event)
    assert run_step(clock, device, reading=1.0, computing=3.0) == 7.0
    assert set(clock.seconds().values()) == {0.0}, "no step is before the first"
    run_step(clock, device, reading=0.0, computing=4.0)
    # The second slot's data were read while the first one was computed, and cost nothing.
    assert clock.seconds() == {
        "data": 1.0,
        "forward_backward": 6.0,
        "communication": 0.75,
        "optimizer": 2.0,
    }


def test_the_clock_of_an_accelerator_never_waits_for_the_device() -> None:
    device = FakeDevice()
    clock = DeviceClock(device.make_event)
    run_step(clock, device, reading=0.0, computing=3.0)
    # A step that is passed over waits for nothing, and the update before it is still running.
    clock.begin()
    clock.mark("communication")
    assert clock.busy_seconds() == 0.0
    assert set(clock.seconds().values()) == {0.0}


def test_the_phases_of_a_cpu_step_are_measured_in_the_step_itself() -> None:
    moments = count(10.0)
    clock = HostClock(now=lambda: next(moments))
    for _ in range(2):
        clock.begin()
        for phase in ("data", "forward_backward", "data", "forward_backward", "optimizer"):
            clock.mark(phase)
        assert clock.busy_seconds() == 4.0
        assert clock.seconds() == {
            "data": 2.0,
            "forward_backward": 2.0,
            "communication": 0.0,
            "optimizer": 1.0,
        }


@pytest.mark.parametrize(("device", "clock"), [("cpu", HostClock), ("cuda", DeviceClock)])
def test_each_device_type_has_its_clock(device: str, clock: type) -> None:
    assert isinstance(build_clock(torch.device(device)), clock)
