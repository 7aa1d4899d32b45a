"""Gangs by Kubernetes' PodGroup, on the control plane of Kubernetes 1.37 (the bed's profile ``next``)."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_runs import Runs, wait_for
from gang_runs import PLACE, Groups, grow_and_replace, place_one_gang_after_the_other, start

pytestmark = [
    pytest.mark.long,
    pytest.mark.e2e,
    pytest.mark.operator_ends,
    pytest.mark.timeout(3600),
]
GROUPS = Groups("scheduling.k8s.io/v1beta1", ("schedulingPolicy", "gang", "minCount"))
LOW, HIGH = "evergrad-e2e-low", "evergrad-e2e-high"


@pytest.fixture(scope="module", autouse=True)
def _gangs(cluster: Any, operator: Any) -> Iterator[None]:
    """An operator that places runs by Kubernetes' PodGroup."""
    if not cluster.api.is_there(f"/apis/{GROUPS.version}"):
        pytest.skip(
            "this Kubernetes has no PodGroup: EVERGRAD_BED_PROFILE=next brings one up"
        )
    operator.upgrade(settings=["runs.gang=podGroup"])
    operator.wait_for_rollout()
    yield
    operator.upgrade()


def test_two_gangs_that_fit_one_after_the_other_never_hold_half_of_their_places_each(
    runs: Runs, faults: Any
) -> None:
    second = place_one_gang_after_the_other(runs, faults, GROUPS)
    pods = second.live_pods().values()
    assert [pod["spec"]["schedulingGroup"] for pod in pods] == [
        {"podGroupName": "second"}
    ] * 2
    assert {pod["spec"]["schedulerName"] for pod in pods} == {"default-scheduler"}

    # In addition to the operator's fields, there are only defaults and the scheduler's field.
    group = GROUPS.of(second)
    (condition,) = group["status"]["conditions"]
    assert (condition["type"], condition["status"]) == (
        "PodGroupInitiallyScheduled",
        "True",
    )
    assert group["spec"] == {
        "schedulingPolicy": {"gang": {"minCount": 2}},
        "disruptionMode": {"single": {}},
        "priority": 0,
    }
    coordinator = second.live_pods(role="coordinator")[0]
    assert "schedulingGroup" not in coordinator["spec"]


def test_a_lost_pod_is_replaced_extra_nodes_join_alone_and_the_minimum_can_change(
    runs: Runs, faults: Any
) -> None:
    run = grow_and_replace(runs, faults, GROUPS)
    identity = GROUPS.of(run)["metadata"]["uid"]
    run.patch({"nodes": {"min": 3, "max": 3}})
    wait_for(lambda: GROUPS.minimum_of(run) == 3, "the higher minimum")
    runs.kubectl("delete", "pod", run.live_pods()[2]["metadata"]["name"], "--wait=false")
    run.wait_for_attempt(2, 1)
    run.wait_for_world(3)
    run.patch({"nodes": {"min": 1, "max": 3}})
    wait_for(lambda: GROUPS.minimum_of(run) == 1, "the lower minimum")
    assert GROUPS.of(run)["metadata"]["uid"] == identity


def test_a_group_has_the_priority_of_its_pods_until_the_run_is_suspended(
    runs: Runs, faults: Any
) -> None:
    faults.set_gpus("n1", 2, resource=PLACE)
    run = start(runs, "urgent", least=2, most=2, template={"priorityClassName": HIGH})
    run.wait_for_pods(0, 1)
    run.wait_for_step(5)
    first = GROUPS.of(run)
    assert (first["spec"]["priorityClassName"], first["spec"]["priority"]) == (HIGH, 1000)

    # A pod with another priority than its group would find no host.
    run.patch({"template": {"priorityClassName": LOW}})
    runs.kubectl("delete", "pod", run.live_pods()[1]["metadata"]["name"], "--wait=false")
    lost = run.wait_for_attempt(1, 1)
    assert lost["spec"]["priorityClassName"] == HIGH
    run.patch({"suspend": True})
    wait_for(lambda: GROUPS.has_no_group(run), "the end of the suspended run's group")
    step = run.newest_step()
    run.patch({"suspend": False})
    pods = run.wait_for_pods(0, 1)
    assert {pod["spec"]["priorityClassName"] for pod in pods.values()} == {LOW}
    run.wait_for_step(step + 5)
    assert GROUPS.of(run)["spec"]["priorityClassName"] == LOW
