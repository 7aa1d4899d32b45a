"""Nodes of the cluster die, freeze and come back."""

from typing import Any

import pytest
from cluster_runs import CHECKPOINT_INTERVAL, ENDLESS, Reference, Run, Runs, wait_for
from operator_watch import API_AWAY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]

SPREAD = [
    {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
    }
]


def start_spread(runs: Runs, name: str) -> tuple[Run, dict[int, str]]:
    """A run with a pod on each node; index → its node."""
    run = runs.start(name, steps=ENDLESS, template={"topologySpreadConstraints": SPREAD})
    pods = run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    return run, {index: pod["spec"]["nodeName"] for index, pod in pods.items()}


# The operator may be on the frozen node: it goes on there without its lease, and ends.
@pytest.mark.operator_ends
@pytest.mark.operator_errors("ends: ", API_AWAY)
def test_05_a_frozen_node_is_left_behind_and_its_ghost_writes_nothing(
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
def test_17_both_nodes_lost_at_once_cost_the_steps_after_the_last_checkpoint(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run, _ = start_spread(runs, "dark")
    run.wait_for_step(110)
    for node in ("n1", "n2"):
        faults.kill_node(node)
    # Nothing trains now. A checkpoint may have been in flight, which has cost the steps since the one before
    # it.
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
