"""One incident that takes a node's pod and the coordinator is one restart."""

import pytest
from simulated_run import Simulation

from evergrad_operator.core.observe.memory import EndRecord, Memory, count_restart


@pytest.mark.parametrize(
    "causes", [("Evicted", "CoordinatorLost"), ("CoordinatorLost", "Evicted")]
)
def test_an_eviction_of_pod_and_coordinator_together_is_one_restart(
    causes: tuple[str, str],
) -> None:
    memory = Memory()
    for number, cause in enumerate(causes):
        memory = count_restart(
            memory, EndRecord(f"pod-{number}", cause, 143, 100.0 + number)
        )
    assert memory.restarts == {"Evicted": 1}
    assert [one.cause for one in memory.ends] == list(causes), "both ends are listed"


def test_two_nodes_that_end_with_the_coordinator_are_two_restarts() -> None:
    memory = Memory()
    for number, cause in enumerate(("Evicted", "CoordinatorLost", "Evicted")):
        memory = count_restart(
            memory, EndRecord(f"pod-{number}", cause, 143, 100.0 + number)
        )
    assert memory.restarts == {"Evicted": 2}


def test_unrelated_ends_count_as_separate_restarts() -> None:
    memory = Memory()
    for cause, at in (
        ("Evicted", 100.0),
        ("CoordinatorLost", 200.0),
        ("WorkerCrash", 201.0),
    ):
        memory = count_restart(memory, EndRecord("pod", cause, None, at))
    assert memory.restarts == {"Evicted": 1, "CoordinatorLost": 1, "WorkerCrash": 1}


def test_a_drained_host_with_node_and_coordinator_shows_one_restart_in_the_status() -> None:
    world = Simulation().run()
    world.age(100)
    world.disrupt("docs-lm-0-0", "EvictionByEvictionAPI")
    world.disrupt("docs-lm-coordinator-0", "EvictionByEvictionAPI")
    world.reconcile()
    world.leave()
    world.settle()
    assert world.status["restarts"] == {"total": 1, "byCause": {"Evicted": 1}}
