"""A quiet cluster: the operator treats no watch as behind, for any earlier events in any order.

If a watch is behind for 100 s, the operator is unhealthy, and the kubelet restarts it.
"""

from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Simulation

from evergrad_operator.edge.metrics.health_checks import STALLED_SECONDS

QUIET_SECONDS = 180.0


@pytest.fixture(
    params=[False, True],
    ids=["the watch is quicker than the answer", "the answer is quicker than the watch"],
)
def simulation(request: pytest.FixtureRequest) -> Simulation:
    simulation = Simulation()
    simulation.is_watch_late = request.param
    simulation.create_run()
    simulation.deliver()
    begin(simulation)
    return simulation


def begin(simulation: Simulation) -> None:
    for act in (lambda: None, simulation.start_pods, simulation.train):
        act()
        simulation.deliver()
        simulation.settle()


def stay_quiet(simulation: Simulation) -> None:
    """Check that nothing happens for three minutes."""
    before = len(simulation.store.changes)
    for _ in range(18):
        simulation.now += QUIET_SECONDS / 18
        assert simulation.watch_lag < STALLED_SECONDS
        simulation.reconcile()
    assert len(simulation.store.changes) == before
    assert simulation.watch_lag == 0.0


def test_a_killed_pod_is_followed_by_three_minutes_without_writes(
    simulation: Simulation,
) -> None:
    simulation.end_pod("run-1-0", 137)
    simulation.deliver()
    simulation.settle()
    assert "run-1-1" in simulation.pods()
    simulation.start_pods()
    simulation.deliver()
    simulation.settle()
    stay_quiet(simulation)


def test_a_pod_that_vanished_without_an_event_is_followed_by_three_minutes_without_writes(
    simulation: Simulation,
) -> None:
    simulation.store.remove("pods", "ns", "run-1-0", is_silent=True)
    simulation.end_pod("run-0-0", 137)
    simulation.deliver()
    simulation.settle()
    simulation.start_pods()
    simulation.deliver()
    simulation.settle()
    stay_quiet(simulation)


def test_a_retried_status_write_without_changes_is_followed_by_three_minutes_without_writes(
    simulation: Simulation,
) -> None:
    original = simulation.cluster.apply
    tries: list[str] = []

    async def apply_twice(body: Any, **options: Any) -> Any:
        if options.get("subresource") == "status":
            await original(body, **options)  # its response is lost
            simulation.deliver()
            tries.append("lost")
        return await original(body, **options)

    simulation.cluster.apply = apply_twice  # type: ignore[method-assign]
    simulation.store.change("trainingruns", *KEY, {"spec": {"suspend": True}})
    simulation.deliver()
    for _ in range(4):
        simulation.settle()
        simulation.reap()
        simulation.deliver()
        simulation.now += 31.0
        simulation.train(
            phase="Stopped",
            reason="AllNodesLeft",
            nodes={"min": 1, "max": 2, "ready": 0, "connected": 0},
        )
    assert tries and simulation.status["phase"] == "Suspended"
    stay_quiet(simulation)


def test_a_resync_is_followed_by_three_minutes_without_writes(
    simulation: Simulation,
) -> None:
    simulation.resync()
    stay_quiet(simulation)
    simulation.start_operator()
    simulation.resync()
    simulation.settle()
    stay_quiet(simulation)


def test_a_watch_that_shows_nothing_any_more_is_detected(simulation: Simulation) -> None:
    simulation.store.on_change = lambda *_: None
    simulation.resync()
    with simulation.by_others():
        simulation.store.merge(
            "trainingruns", *KEY, {"metadata": {"annotations": {"x": "y"}}}
        )
    simulation.resync()
    simulation.now += STALLED_SECONDS + 1
    assert simulation.watch_lag > STALLED_SECONDS
