"""A worker's last signs of life can be read by its supervisor when it is gone."""

import multiprocessing

import pytest

from evergrad_trainer.worker import pulse as pulse_module
from evergrad_trainer.worker.pulse import Pulse


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(pulse_module.time, "monotonic", lambda: now[0])
    return now


def test_nothing_is_known_before_the_first_beat() -> None:
    pulse = Pulse()
    assert (pulse.step, pulse.slot, pulse.longest_slot_seconds) == (-1, -1, 0.0)
    pulse.rest()
    assert pulse.longest_slot_seconds == 0.0


def test_waiting_for_others_is_no_part_of_a_slot(clock: list[float]) -> None:
    pulse = Pulse()
    for slot, seconds in enumerate((2.0, 5.0, 1.0)):
        pulse.beat(7, slot)
        clock[0] += seconds
    pulse.rest()
    clock[0] += 60.0
    pulse.rest()
    pulse.beat(8, 0)
    assert (pulse.step, pulse.slot, pulse.longest_slot_seconds) == (8, 0, 5.0)


def test_the_supervisor_reads_what_another_process_has_begun() -> None:
    pulse = Pulse()
    process = multiprocessing.get_context("spawn").Process(target=pulse.beat, args=(4, 2))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (pulse.step, pulse.slot) == (4, 2)
