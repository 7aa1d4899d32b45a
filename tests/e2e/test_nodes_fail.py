"""Nodes of the cluster die, freeze and return."""

from typing import Any

import pytest
from cluster_runs import (
    CHECKPOINT_INTERVAL,
    ENDLESS,
    RESOURCE,
    Reference,
    Run,
    Runs,
    wait_for,
)
from operator_watch import API_AWAY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

PLACE = "example.com/place"
"""A simulated device. Hosts have exactly as many as a test needs."""
SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
    }
]


def start_spread(runs: Runs, name: str) -> tuple[Run, dict[int, str]]:
    """Start a run with a pod on each node; returns the node by index."""
    run = runs.start(name, steps=ENDLESS, template={"topologySpreadConstraints": SPREAD})
    pods = run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    return run, {index: pod["spec"]["nodeName"] for index, pod in pods.items()}


# The operator may be on the frozen node: it resumes there without its lease, and ends.
@pytest.mark.operator_ends
@pytest.mark.operator_errors("ends: ", API_AWAY)
def test_05_a_frozen_node_is_excluded_and_its_stale_processes_write_nothing(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run, places = start_spread(runs, "frozen")
    assert len(set(places.values())) == 2
    coordinator = run.live_pods(role="coordinator")[0]["spec"]["nodeName"]
    index = next(index for index, node in places.items() if node != coordinator)
    faults.freeze_node(places[index])
    run.wait_for_world(1)
    run.wait_for_step(run.newest_step() + 20)
    successor = f"frozen-{index}-1"
    wait_for(
        lambda: any(pod["metadata"]["name"] == successor for pod in run.pods()),
        "the lost pod's successor",
    )
    run.wait_for_world(2)
    generations = list(run.generations())
    faults.thaw_node(places[index])
    wait_for(
        lambda: all(pod["metadata"]["name"] != f"frozen-{index}-0" for pod in run.pods()),
        "the ghost's end",
    )
    run.wait_for_step(run.newest_step() + 20)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    later = list(run.generations())
    assert later[: len(generations)] == generations and later == sorted(later), (
        "an older group has written"
    )
    wait_for(
        lambda: run.status()["failures"]["withoutProgress"] == 0,
        "the lost nodes to be no failures",
    )
    assert "WorkerCrash" not in run.status()["restarts"]["byCause"]


@pytest.mark.long
@pytest.mark.operator_ends
@pytest.mark.operator_errors("ends: ", API_AWAY)
def test_17_both_nodes_lost_together_cost_the_steps_after_the_last_checkpoint(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run, _ = start_spread(runs, "dark")
    run.wait_for_step(110)
    for node in ("n1", "n2"):
        faults.kill_node(node)
    # Nothing trains now. A checkpoint may have been in progress, which costs the steps since the previous
    # one.
    before, saved = run.newest_step(), run.newest_checkpoint()
    assert saved >= before - 2 * CHECKPOINT_INTERVAL
    faults.restore()
    run.wait_for_pods(0, 1)
    run.wait_for_step(before + 20)
    run.expect_same_as(reference)
    assert run.repeated_steps() <= before - saved
    generations = list(run.generations())
    assert generations == sorted(generations)
    assert run.status()["failures"]["withoutProgress"] == 0


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.operator_ends
def test_a_run_below_its_minimum_releases_its_pods_and_another_uses_the_hosts(
    runs: Runs, operator: Any, faults: Any
) -> None:
    faults.set_gpus("n1", 1, resource=PLACE)
    place = {"resources": {"requests": {PLACE: "1"}, "limits": {PLACE: "1"}}}
    operator.upgrade(settings=["operator.extraArgs={--give-back-seconds=20}"])
    try:
        short = runs.start("short", steps=ENDLESS, nodes={"min": 2, "max": 2}, **place)
        wait_for(
            lambda: short.status().get("reason") == "PodsGivenBack",
            "the pods to be given back",
        )
        assert short.status()["phase"] == "Waiting"
        assert "fewer than 2 nodes found a host within 20s" in short.status()["message"]
        wait_for(lambda: not short.pods(), "the pods' end")
        assert short.status()["restarts"]["total"] == 0
        assert not short.is_true("Stalled")
        # The slot is free for other runs, which is the purpose of giving it back.
        other = runs.start("other", steps=ENDLESS, nodes={"min": 1, "max": 1}, **place)
        other.wait_for_step(5)
        runs.kubectl("delete", RESOURCE, "other", "--wait=true")

        # Hosts become available; the run retries by itself, after a pause of some minutes.
        faults.set_gpus("n2", 1, resource=PLACE)
        short.wait_for_pods(0, 1, seconds=900)
        short.wait_for_step(5)
    finally:
        operator.upgrade()
