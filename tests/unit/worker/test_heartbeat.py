"""A worker's last heartbeat can be read by its supervisor after the worker has exited."""

import multiprocessing

import pytest
import torch
from patience import PATIENCE

from evergrad_trainer.base.device_memory import report_device_memory
from evergrad_trainer.worker import liveness as heartbeat_module
from evergrad_trainer.worker.liveness import WorkerHeartbeat


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(heartbeat_module.time, "monotonic", lambda: now[0])
    return now


def test_the_age_is_unknown_before_the_first_heartbeat() -> None:
    heartbeat = WorkerHeartbeat()
    assert (heartbeat.step, heartbeat.slot, heartbeat.longest_slot_seconds) == (-1, -1, 0.0)
    heartbeat.rest()
    assert heartbeat.longest_slot_seconds == 0.0


def test_waiting_for_other_ranks_does_not_count_as_slot_time(clock: list[float]) -> None:
    heartbeat = WorkerHeartbeat()
    for slot, seconds in enumerate((2.0, 5.0, 1.0)):
        heartbeat.beat(7, slot)
        clock[0] += seconds
    heartbeat.rest()
    clock[0] += 60.0
    heartbeat.rest()
    heartbeat.beat(8, 0)
    assert (heartbeat.step, heartbeat.slot, heartbeat.longest_slot_seconds) == (8, 0, 5.0)


def test_the_supervisor_reads_the_slot_that_another_process_started() -> None:
    heartbeat = WorkerHeartbeat()
    process = multiprocessing.get_context("spawn").Process(
        target=heartbeat.beat, args=(4, 2)
    )
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    assert (heartbeat.step, heartbeat.slot) == (4, 2)


def test_device_memory_is_unknown_before_the_worker_reports_it() -> None:
    heartbeat = WorkerHeartbeat()
    assert heartbeat.held_bytes is None
    heartbeat.beat(1, 0)
    heartbeat.hold((3, 2**40, 5))
    assert heartbeat.held_bytes == (3, 2**40, 5)
    assert (heartbeat.step, heartbeat.slot) == (1, 0)


def test_memory_is_read_only_on_devices_with_statistics_and_if_it_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def memory_stats(device: torch.device) -> dict[str, int]:
        asked.append(device)
        return {
            "allocated_bytes.all.current": 10,
            "reserved_bytes.all.current": 30,
            "allocated_bytes.all.peak": 20,
        }

    monkeypatch.setattr(torch.cuda, "memory_stats", memory_stats)
    heartbeat = WorkerHeartbeat()
    report_device_memory(torch.device("cuda", 1), None)
    assert asked == []
    report_device_memory(torch.device("cpu"), heartbeat.hold)
    assert asked == [] and heartbeat.held_bytes is None
    report_device_memory(torch.device("cuda", 1), heartbeat.hold)
    assert asked == [torch.device("cuda", 1)]
    assert heartbeat.held_bytes == (10, 30, 20)
