"""Gangs by the coscheduling plug-in itself: the nodes that a run cannot do without get hosts together or not at
all. scheduler-plugins v0.34.7 runs beside the bed."""

from collections.abc import Iterator
from typing import Any

import pytest
from bed.coscheduling import GROUPS, SCHEDULER, Coscheduling
from cluster_runs import ENDLESS, GROUP, RESOURCE, Run, Runs, wait_for
from cluster_shell import Shell
from pages import read_commands

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.operator_ends,
    pytest.mark.timeout(1200),
]
PLACE = "example.com/place"
"""A made-up device, of which the hosts have just so many as a test needs."""


@pytest.fixture(scope="module")
def scheduler(
    cluster: Any, operator: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coscheduling]:
    """The gang scheduler, and an operator that places runs by it, as the page on queues makes it."""
    if not cluster.is_bed:
        pytest.skip("the gang scheduler is started beside the bed only.")
    one = Coscheduling(cluster.api)
    try:
        one.bring_type()
        one.start()
        shell = Shell(cluster, tmp_path_factory.mktemp("shell"))
        [command] = read_commands("docs/queues.md", "## Gangs without a queue")
        shell.run(command)
        operator.wait_for_rollout()
        yield one
    finally:
        operator.upgrade()
        one.remove()


def start(runs: Runs, name: str, *, least: int, most: int) -> Run:
    """A run of so many nodes, each of which takes one place of a host."""
    return runs.start(
        name,
        steps=ENDLESS,
        nodes={"min": least, "max": most},
        resources={"requests": {PLACE: "1"}, "limits": {PLACE: "1"}},
    )


def group_of(run: Run) -> dict[str, Any]:
    """The run's PodGroup."""
    path = f"{GROUPS}/namespaces/{run.runs.namespace}/podgroups/{run.name}"
    found: dict[str, Any] = run.runs.cluster.api.get(path)
    return found


def hosts(run: Run) -> dict[int, str]:
    """Index of each pod → its host, empty where it has none."""
    return {
        int(pod["metadata"]["labels"][f"{GROUP}/index"]): str(pod["spec"].get("nodeName", ""))
        for pod in run.pods()
    }


def test_two_gangs_that_fit_one_after_the_other_never_hold_half_of_the_places_each(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    del scheduler
    faults.set_gpus("n1", 2, resource=PLACE)
    faults.set_gpus("n2", 1, resource=PLACE)
    first = start(runs, "first", least=2, most=2)
    first.wait_for_pods(0, 1, seconds=600)
    first.wait_for_step(5)
    assert group_of(first)["spec"]["minMember"] == 2
    assert {pod["spec"]["schedulerName"] for pod in first.live_pods().values()} == {SCHEDULER}

    # One place is free. Without a gang, a pod of the second run would take it, and wait for ever.
    second = start(runs, "second", least=2, most=2)
    wait_for(lambda: len(hosts(second)) == 2, "both pods of the second run")
    wait_for(
        lambda: second.status().get("reason") == "Unschedulable", "the second run's own words"
    )
    assert hosts(second) == {0: "", 1: ""}, second.status()

    # The place is really free: a run of one node gets it.
    single = start(runs, "single", least=1, most=1)
    single.wait_for_step(5)
    assert hosts(second) == {0: "", 1: ""}
    runs.kubectl("delete", RESOURCE, "single")

    runs.kubectl("delete", RESOURCE, "first")
    second.wait_for_pods(0, 1, seconds=600)
    second.wait_for_step(5)
    wait_for(
        lambda: (
            not runs.cluster.api.is_there(
                f"{GROUPS}/namespaces/{runs.namespace}/podgroups/first"
            )
        ),
        "the end of the first run's group",
    )


def test_a_lost_pod_of_a_gang_is_replaced_and_nodes_above_the_minimum_come_one_by_one(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    del scheduler
    faults.set_gpus("n1", 2, resource=PLACE)
    run = start(runs, "elastic", least=2, most=3)
    run.wait_for_world(2)
    run.wait_for_step(5)
    faults.set_gpus("n2", 1, resource=PLACE)
    run.wait_for_pods(0, 1, 2, seconds=600)
    run.wait_for_world(3)

    step = run.newest_step()
    runs.kubectl("delete", "pod", run.live_pods()[0]["metadata"]["name"], "--wait=false")
    run.wait_for_attempt(0, 1, seconds=600)
    run.wait_for_world(3)
    run.wait_for_step(step + 10)
    assert group_of(run)["spec"]["minMember"] == 2
    assert run.restarts() == {"Deleted": 1}


def test_without_its_type_a_run_waits_with_words_and_begins_once_it_is_there(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    faults.set_gpus("n1", 2, resource=PLACE)
    scheduler.remove()
    try:
        run = start(runs, "early", least=2, most=2)
        wait_for(lambda: run.status().get("reason") == "GangUnavailable", "GangUnavailable")
        assert run.is_so("Stalled") and run.pods() == []
        assert "scheduling.x-k8s.io" in run.status()["message"]
    finally:
        scheduler.bring_type()
        scheduler.start()
    run.wait_for_pods(0, 1, seconds=600)
    run.wait_for_step(5)
