"""Gangs with the coscheduling plug-in: the nodes that a run requires get hosts together, or not at all.

scheduler-plugins v0.34.7 runs next to the bed.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_runs import Runs, wait_for
from cluster_shell import Shell
from gang_runs import PLACE, Groups, grow_and_replace, place_one_gang_after_the_other, start
from pages import read_commands

from bed.coscheduling import SCHEDULER, Coscheduling

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.operator_ends,
    pytest.mark.timeout(3600),
]
GROUPS = Groups("scheduling.x-k8s.io/v1alpha1", ("minMember",))


@pytest.fixture(scope="module")
def scheduler(
    cluster: Any, operator: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Coscheduling]:
    """The gang scheduler, and an operator that places runs by it, as configured on the page on queues."""
    if not cluster.is_bed:
        pytest.skip("the gang scheduler is started beside the bed only.")
    one = Coscheduling(cluster.api)
    try:
        one.bring_type()
        one.start()
        shell = Shell(cluster, tmp_path_factory.mktemp("shell"))
        [command] = read_commands("docs/operate/queues.md", "## Gangs without a queue")
        shell.run(command)
        operator.wait_for_rollout()
        yield one
    finally:
        operator.upgrade()
        one.remove()


def test_two_gangs_that_fit_one_after_the_other_never_hold_half_of_their_places_each(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    del scheduler
    second = place_one_gang_after_the_other(runs, faults, GROUPS)
    assert {pod["spec"]["schedulerName"] for pod in second.live_pods().values()} == {
        SCHEDULER
    }


def test_a_lost_pod_of_a_gang_is_replaced_and_nodes_above_the_minimum_join_one_by_one(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    del scheduler
    grow_and_replace(runs, faults, GROUPS)


def test_without_the_group_type_a_run_waits_with_a_message_and_starts_once_it_exists(
    runs: Runs, scheduler: Coscheduling, faults: Any
) -> None:
    faults.set_gpus("n1", 2, resource=PLACE)
    scheduler.remove()
    try:
        run = start(runs, "early", least=2, most=2)
        wait_for(lambda: run.status().get("reason") == "GangUnavailable", "GangUnavailable")
        assert run.is_true("Stalled") and run.pods() == []
        assert "scheduling.x-k8s.io" in run.status()["message"]
    finally:
        scheduler.bring_type()
        scheduler.start()
    run.wait_for_pods(0, 1)
    run.wait_for_step(5)
