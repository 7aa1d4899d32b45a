"""Health: it reports only problems that a restart would solve."""

import pytest

from evergrad_operator.core.objects.names import Key
from evergrad_operator.edge.api.lease import LeaseGate, LeaseSettings
from evergrad_operator.edge.api.transport import Gate, OpenGate
from evergrad_operator.edge.cache.cache import InformerCache
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.cache.store import RUNS
from evergrad_operator.edge.metrics.health_checks import Vitals


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def build(clock: Clock, gate: Gate) -> tuple[WorkQueue[Key], InformerCache, Vitals]:
    queue: WorkQueue[Key] = WorkQueue(clock=clock)
    cache = InformerCache(clock=clock)
    vitals = Vitals(queue=queue, cache=cache, gate=gate)
    vitals.is_synced = True
    return queue, cache, vitals


def test_a_start_with_ten_thousand_runs_is_healthy_while_passes_finish(
    clock: Clock,
) -> None:
    queue, _, vitals = build(clock, OpenGate())
    for number in range(10_000):
        queue.add(("ns", f"r{number}"))
    clock.now += 300.0
    queue._progressed_at = clock.now - 2.0  # a pass has ended two seconds ago
    assert vitals.find_stall() is None
    clock.now += 101.0
    assert "no pass has finished, and 10000 runs wait" in str(vitals.find_stall())


def test_an_operator_that_waits_for_its_lease_is_healthy(clock: Clock) -> None:
    gate = LeaseGate(LeaseSettings("ns", "evergrad-operator", "a"), clock=clock)
    queue, cache, vitals = build(clock, gate)
    queue.add(("ns", "r"))
    raw = {"metadata": {"name": "r", "namespace": "ns", "uid": "u", "resourceVersion": "5"}}
    cache.see(RUNS, {**raw, "spec": {}})
    clock.now += 1000.0
    assert vitals.find_stall() is None
    assert vitals.find_unready() is None

    # When the lease is held again, earlier times do not count.
    gate._held_until = clock.now + 10_000.0
    assert vitals.find_stall() is not None
    cache.expectations.restart()
    queue.resume()
    assert vitals.find_stall() is None
    clock.now += 101.0
    queue.drop(("ns", "r"))
    assert "a watch is behind" in str(vitals.find_stall())
