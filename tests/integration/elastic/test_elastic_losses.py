"""Nodes and workers that die, at every place of a step and of a change: survivors keep their processes,
nothing is lost."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, fault
from run_helpers import events

MakeCluster = Callable[..., Cluster]


@pytest.mark.acceptance("8d-1g:pretrain", "8d-2e:pretrain")
@pytest.mark.parametrize(
    ("place", "finished"),
    [("slot", {3}), ("tally", {3}), ("reducing", {3, 4}), ("update", {4}), ("report", {4})],
)
def test_a_node_killed_at_any_point_of_a_step_costs_no_finished_step(
    make_elastic: MakeCluster, undisturbed: Any, place: str, finished: set[int]
) -> None:
    """``finished``: possible values of the last step of three; with the sum in progress, it may still reach
    the others."""
    cluster = make_elastic().start(
        faults=[fault("SIGKILL", place, node=1, step=4, to="node", name="kill")]
    )
    cluster.finish(nodes=[0, 2])
    assert cluster.has_happened("kill") and cluster.nodes[1].wait() == -9
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == len(cluster.pids(2)) == 1
    assert max(row["step"] for row in cluster.trace() if row["size"] == 3) in finished
    (world,) = events(cluster.directory, "world")
    assert world["world_size"] == 2


def test_after_a_kill_of_rank_0_the_next_rank_takes_over(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic().start(
        faults=[fault("SIGKILL", "slot", node=0, step=7, to="node")]
    )
    cluster.finish(nodes=[1, 2])
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(1)) == len(cluster.pids(2)) == 1
    assert max(row["step"] for row in cluster.trace() if row["node"] == 0) == 6 < STEPS


@pytest.mark.parametrize("place", ["announce", "provenance"])
def test_if_rank_0_is_killed_before_it_has_written_the_start_the_next_rank_writes_it(
    make_elastic: MakeCluster, undisturbed: Any, place: str
) -> None:
    """All had their state then. Without run.json the run could never be started again."""
    cluster = make_elastic(expect=2).start(
        faults=[fault("SIGKILL", place, node=0, to="node", name="kill")]
    )
    cluster.finish(nodes=[1])
    assert cluster.has_happened("kill") and len(cluster.pids(1)) == 1
    cluster.check(undisturbed.at("undisturbed"))
    record = json.loads((cluster.directory / "run.json").read_text())
    (start,) = events(cluster.directory, "start")
    assert record["runId"] and start["world_size"] == 1
    (process,) = json.loads((cluster.directory / "provenance.json").read_text())[
        "processes"
    ]
    assert process["world_size"] == 1


def test_a_killed_worker_is_replaced_and_its_sibling_stays(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2).start(
        workers=2, faults=[fault("SIGKILL", "reducing", node=1, local_rank=1, step=3)]
    )
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    before = {
        (row["node"], row["local_rank"]): row["pid"]
        for row in cluster.trace()
        if row["step"] == 1
    }
    after = {
        (row["node"], row["local_rank"]): row["pid"]
        for row in cluster.trace()
        if row["step"] == STEPS
    }
    assert {
        place for place in before if after.get(place, before[place]) != before[place]
    } <= {(1, 1)}
    assert [
        line["cause"] for line in cluster.log("broken") if line["cause"] != "peer_lost"
    ] == ["worker_crash"]
