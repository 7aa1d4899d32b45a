"""A worker's last signs of life can be read by its supervisor when it is gone."""

import multiprocessing

import pytest

from evergrad_trainer.worker import heartbeat as heartbeat_module
from evergrad_trainer.worker.heartbeat import WorkerHeartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(heartbeat_module.time, "monotonic", lambda: now[0])
    return now


def test_nothing_is_known_before_the_first_beat() -> None:
    heartbeat = WorkerHeartbeat()
    assert (heartbeat.step, heartbeat.slot, heartbeat.longest_slot_seconds) == (-1, -1, 0.0)
    heartbeat.rest()
    assert heartbeat.longest_slot_seconds == 0.0


def test_waiting_for_others_is_no_part_of_a_slot(clock: list[float]) -> None:
    heartbeat = WorkerHeartbeat()
    for slot, seconds in enumerate((2.0, 5.0, 1.0)):
        heartbeat.beat(7, slot)
        clock[0] += seconds
    heartbeat.rest()
    clock[0] += 60.0
    heartbeat.rest()
    heartbeat.beat(8, 0)
    assert (heartbeat.step, heartbeat.slot, heartbeat.longest_slot_seconds) == (8, 0, 5.0)


def test_the_supervisor_reads_what_another_process_has_begun() -> None:
    heartbeat = WorkerHeartbeat()
    process = multiprocessing.get_context("spawn").Process(target=heartbeat.beat, args=(4, 2))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert (heartbeat.step, heartbeat.slot) == (4, 2)
