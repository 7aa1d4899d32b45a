"""A coordinator that does not respond: its pods are listed after fifteen seconds, and it is reported as
unreachable after a minute."""

from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Simulation, make_trained

from evergrad_operator.edge.reconcile.reconciler import SILENCE_SECONDS


@pytest.fixture
def simulation() -> Simulation:
    return make_trained()


def condition(simulation: Simulation) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one
        for one in simulation.status["conditions"]
        if one["type"] == "CoordinatorUnreachable"
    )
    return found


def test_a_coordinator_that_vanished_without_an_event_is_replaced_after_15_s_of_silence(
    simulation: Simulation,
) -> None:
    simulation.store.remove("pods", "ns", "run-coordinator-0", is_silent=True)
    simulation.store.remove("pods", "ns", "run-1-0", is_silent=True)
    simulation.fall_silent()
    simulation.now += SILENCE_SECONDS - 1
    simulation.settle()
    assert simulation.pods("coordinator") == []
    simulation.now += 2
    simulation.settle()
    assert simulation.pods("coordinator") == ["run-coordinator-1"]
    assert simulation.pods() == ["run-0-0", "run-1-1"]


def test_the_pods_of_a_silent_coordinator_are_listed_with_growing_pauses(
    simulation: Simulation,
) -> None:
    simulation.fall_silent()
    simulation.cluster.reads.clear()
    listed = []
    for second in range(600):
        simulation.now += 1
        simulation.reconcile()
        if simulation.cluster.reads:
            listed.append(second + 1)
            simulation.cluster.reads.clear()
    assert listed == [15, 30, 60, 120, 240, 480]


def test_a_coordinator_that_is_silent_for_a_minute_is_a_condition_until_it_responds(
    simulation: Simulation,
) -> None:
    assert (condition(simulation)["status"], condition(simulation)["reason"]) == (
        "False",
        "NothingInTheWay",
    )
    simulation.fall_silent()
    simulation.now += 59
    simulation.reconcile()
    assert condition(simulation)["status"] == "False"
    simulation.now += 2
    simulation.coordinators.answers.clear()
    simulation.reconcile()
    assert (condition(simulation)["status"], condition(simulation)["reason"]) == (
        "True",
        "CoordinatorUnreachable",
    )
    assert "did not answer GET /status" in condition(simulation)["message"]
    assert "network policies" in condition(simulation)["message"]
    assert simulation.status["phase"] == "Running"  # the previous knowledge still applies
    before = len(simulation.store.writes)
    simulation.now += 30
    simulation.reconcile()
    assert len(simulation.store.writes) == before  # it is reported once
    simulation.coordinators.silent_since.clear()
    simulation.train(5)
    simulation.reconcile()
    assert condition(simulation)["status"] == "False"


def test_a_run_whose_coordinator_was_never_reached_becomes_stalled() -> None:
    simulation = Simulation()
    simulation.create_run()
    simulation.settle()
    simulation.start_pods()
    simulation.settle()
    assert simulation.status["reason"] == "Starting"
    simulation.fall_silent()
    simulation.now += 61
    simulation.settle()
    assert (simulation.status["phase"], simulation.status["reason"]) == (
        "Waiting",
        "CoordinatorUnreachable",
    )
    stalled = next(
        one for one in simulation.status["conditions"] if one["type"] == "Stalled"
    )
    assert stalled["status"] == "False"
    simulation.now += 300
    simulation.settle()
    stalled = next(
        one for one in simulation.status["conditions"] if one["type"] == "Stalled"
    )
    assert (stalled["status"], stalled["reason"]) == ("True", "CoordinatorUnreachable")


def test_a_run_that_vanished_without_an_event_causes_a_new_list(
    simulation: Simulation,
) -> None:
    missed: list[bool] = []
    simulation.reconciler.statuses.on_missing = lambda: missed.append(True)
    simulation.store.remove("trainingruns", *KEY, is_silent=True)
    simulation.now += 60
    simulation.train(7)
    simulation.reconcile()
    assert missed == [True]
    simulation.resync()
    simulation.reconcile()
    assert simulation.cache.run(KEY) is None
    assert not simulation.coordinators._followed
