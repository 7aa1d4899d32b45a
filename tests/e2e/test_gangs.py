"""A run that a gang scheduler places: no pod finds a host before all that it cannot do without do.

The coscheduling plug-in runs beside the bed, as a second scheduler.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from bed.coscheduling import GROUPS, NAME, Coscheduling
from cluster_runs import ENDLESS, Runs, make_manifest, wait_for

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(1200)]
DEVICE = "example.com/place"
"""A resource of the nodes, so that room is a number and nothing else of the machine counts."""


@pytest.fixture(scope="module")
def gangs(cluster: Any, operator: Any) -> Iterator[None]:
    """The scheduler, and an operator that places runs by it."""
    if not cluster.is_bed:
        pytest.skip("The gang scheduler is started beside the bed only.")
    scheduler = Coscheduling(cluster.api)
    try:
        scheduler.install()
        operator.upgrade(settings=["runs.gang=coscheduling", f"runs.schedulerName={NAME}"])
        yield
    finally:
        operator.upgrade(settings=["runs.gang=none", "runs.schedulerName="])
        scheduler.remove()


def offer(cluster: Any, places: dict[str, int]) -> None:
    """Give each node so many places."""
    for node, number in places.items():
        cluster.api.patch(
            f"/api/v1/nodes/{node}/status",
            {"status": {"capacity": {DEVICE: str(number)}}},
        )


def hosts(pods: Iterable[dict[str, Any]]) -> set[str]:
    """Names of the hosts of pods; empty for those that have none."""
    return {pod["spec"].get("nodeName", "") for pod in pods}


@pytest.mark.operator_ends
def test_a_gang_of_three_on_room_for_two_starts_no_pod_and_then_all_three(
    gangs: None, cluster: Any, runs: Runs
) -> None:
    del gangs
    first, second = sorted(
        node["metadata"]["name"] for node in cluster.api.get("/api/v1/nodes")["items"]
    )[:2]
    offer(cluster, {first: 1, second: 1})
    amounts = {DEVICE: "1"}
    spec = {
        "nodes": {"min": 3, "max": 3},
        "workersPerNode": 1,
        "resources": {"requests": amounts, "limits": amounts},
    }
    run = runs.apply(make_manifest("gang", steps=ENDLESS, changes=spec))
    group = f"{GROUPS}/namespaces/{runs.namespace}/podgroups/{run.name}"
    wait_for(lambda: len(run.pods(role="node")) == 3, "three pods")
    assert cluster.api.get(group)["spec"]["minMember"] == 3

    # The scheduler has tried, and no pod has a host; one by one two of them would have one by now.
    wait_for(lambda: run.status().get("reason") == "Unschedulable", "the scheduler's refusal")
    assert hosts(run.pods(role="node")) == {""}

    offer(cluster, {first: 2, second: 1})
    pods = run.wait_for_pods(0, 1, 2, seconds=600)
    assert hosts(pods.values()) == {first, second}
    run.wait_for_world(3)
    assert run.restarts() == {}
    run.runs.kubectl("delete", "trainingruns.evergrad.dev", run.name, "--wait=false")
    wait_for(lambda: not cluster.api.is_there(group), "the group's end")
    offer(cluster, {first: 0, second: 0})
