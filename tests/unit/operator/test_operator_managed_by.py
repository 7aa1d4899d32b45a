"""``spec.managedBy``: the operator writes nothing of a run of another controller."""

from typing import Any

import pytest
from fake_kubernetes.simulation import KEY, Simulation
from fake_kubernetes.store import Write

from evergrad_operator.core.fleet import build_row
from evergrad_operator.core.observe.facts import count_phases
from evergrad_operator.edge.api.transport import OpenGate
from evergrad_operator.edge.cache.queue import WorkQueue
from evergrad_operator.edge.metrics.health_checks import Vitals

OTHER = "kueue.x-k8s.io/multikueue"


def managed(manager: str, **spec: Any) -> Simulation:
    simulation = Simulation()
    simulation.create_run(managedBy=manager, **spec)
    return simulation


@pytest.mark.parametrize(
    "spec",
    [
        {},
        {"suspend": True},
        {"nodes": {"min": "many"}},
        {"image": "Not An Image"},
        {"storage": {"claimName": "shared"}},
    ],
)
def test_nothing_is_written_for_a_run_of_another_controller(spec: Any) -> None:
    simulation = managed(OTHER, **spec)
    tried: list[Write] = []
    simulation.store.before = tried.append
    before = simulation.store.get("trainingruns", *KEY)
    for _ in range(3):
        assert simulation.reconcile() is None
    assert tried == [] and simulation.store.writes == []
    assert simulation.cluster.reads == [], "nor is anything asked for it"
    assert simulation.store.get("trainingruns", *KEY) == before
    assert simulation.children() == []


def test_the_status_that_another_controller_writes_to_its_run_stays() -> None:
    simulation = managed(OTHER)
    status = {"phase": "Running", "message": "runs in cluster b", "observedGeneration": 1}
    simulation.store.change("trainingruns", *KEY, {"status": status})
    simulation.reconcile()
    simulation.store.change(
        "trainingruns", *KEY, {"metadata": {"deletionTimestamp": "now"}}
    )
    simulation.reconcile()
    assert simulation.status == status and simulation.store.writes == []


def test_managed_by_with_the_name_of_the_operator_is_equal_to_no_managed_by() -> None:
    simulation = managed("evergrad.dev/operator")
    simulation.settle()
    assert simulation.pods() == ["run-0-0", "run-1-0"]
    assert simulation.status["phase"] == "Starting"


def test_a_run_of_another_controller_has_no_metrics_and_is_marked_on_the_fleet_page() -> (
    None
):
    simulation = managed(OTHER)
    vitals = Vitals(queue=WorkQueue(spacing=0.1), cache=simulation.cache, gate=OpenGate())
    facts = vitals.read_facts()
    assert facts.runs == () and set(facts.phases.values()) == {0}
    raw = simulation.store.get("trainingruns", *KEY)
    assert count_phases([raw])["Pending"] == 1, "the facts alone know of no manager"
    assert build_row(raw)["message"] == f"managed by {OTHER}"
