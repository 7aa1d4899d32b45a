"""Nodes that join, and nodes that leave on request: no step is repeated, and no node saves unnecessarily."""

import signal
from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, fault
from run_helpers import STOPPED_SAVED, checkpoints, events, steps_of

MakeCluster = Callable[..., Cluster]


@pytest.mark.acceptance("8d-1h:pretrain")
def test_two_joining_nodes_receive_the_state_and_train(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2, max_nodes=4).start(
        faults=[fault("hold", "slot", node=0, step=4, name="held")]
    )
    cluster.until_held()
    cluster.start_node(2)
    cluster.start_node(3)
    cluster.until(
        lambda: {line["node"] for line in cluster.log("hello")} == set("0123"),
        "both newcomers",
    )
    cluster.until(lambda: cluster.log("plan")[-1]["members"] == 4, "a plan of four")
    cluster.release("held")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in range(4)] == [1, 1, 1, 1]
    first = cluster.steps(3)[0]
    assert first > 4 and cluster.steps(2) == cluster.steps(3) == list(
        range(first, STEPS + 1)
    )
    assert all(not line["hard"] for line in cluster.log("plan"))


@pytest.mark.acceptance("8d-1h:pretrain")
def test_a_world_of_one_grows_and_shrinks_again(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=1).start(
        faults=[fault("hold", "slot", node=0, step=4, name="held")]
    )
    cluster.until_held()
    cluster.start_node(1, faults=[fault("SIGKILL", "tally", node=1, call=3, to="node")])
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish(nodes=[0])
    cluster.check(undisturbed.at("undisturbed"))
    alone = cluster.steps(1)[0] - 1
    assert [row["size"] for row in cluster.trace() if row["node"] == 0] == [1] * alone + [
        2
    ] * 2 + [1] * (STEPS - alone - 2)
    assert len(cluster.pids(0)) == 1


@pytest.mark.acceptance("8d-1f:pretrain")
def test_a_node_that_is_asked_to_drain_leaves_at_a_step_boundary(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic().start(
        faults=[fault("hold", "slot", node=0, step=3, name="held")]
    )
    cluster.until_held()
    cluster.nodes[0].send(signal.SIGTERM)
    cluster.until_planned("node 0 leaving")
    cluster.release("held")
    assert cluster.nodes[0].wait() == STOPPED_SAVED
    cluster.finish(nodes=[1, 2])
    cluster.check(undisturbed.at("undisturbed"))
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1)), (
        "no step is trained twice"
    )
    assert 3 <= cluster.steps(0)[-1] < cluster.steps(1)[-1], (
        "it has left before the others ended"
    )
    assert checkpoints(cluster.directory) == [5, 10, STEPS], (
        "nobody saves for a node that leaves"
    )


@pytest.mark.acceptance("8d-5f:pretrain")
def test_if_all_nodes_are_asked_to_drain_they_save_together_once_and_the_run_resumes_later(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(options=("--lease", "2")).start(
        faults=[fault("hold", "slot", node=0, step=3, name="held")]
    )
    cluster.until_held()
    for node in cluster.nodes.values():
        node.send(signal.SIGTERM)
    cluster.until(lambda: cluster.log("plan")[-1]["members"] == 0, "a plan of nobody")
    cluster.release("held")
    cluster.finish(STOPPED_SAVED)
    assert cluster.coordinator is not None and cluster.coordinator.wait() == STOPPED_SAVED
    last = steps_of(cluster.directory)[-1]
    assert last < STEPS and checkpoints(cluster.directory)[-1] == last
    saves = [
        event
        for event in events(cluster.directory, "save")
        if event["checkpoint"].startswith(f"step-{last}")
    ]
    assert len(saves) == 1, "the state is saved once"
    [folder] = (cluster.directory / "checkpoints").glob(f"step-{last}*")
    parts = sorted(path.name for path in folder.glob("rank-*.bin"))
    assert parts == [f"rank-{rank:05}.bin" for rank in range(3)], (
        "each node wrote its share"
    )
    cluster.start()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


@pytest.mark.acceptance("8d-1g:pretrain")
def test_below_the_minimum_the_state_stays_in_memory_until_enough_nodes_return(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    death = fault("SIGKILL", "slot", node=1, step=4, to="node")
    cluster = make_elastic(min_nodes=2, expect=2).start(faults=[death])
    cluster.until(lambda: cluster.log("waiting"), "the wait for nodes")
    assert checkpoints(cluster.directory) == []
    cluster.start_node(1)
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1 and len(cluster.pids(1)) == 2
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


def test_of_a_node_started_twice_the_newer_process_stays(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic().start(
        faults=[fault("hold", "slot", node=0, step=4, name="held")]
    )
    cluster.until_held()
    older = cluster.nodes[1]
    cluster.start_node(1)
    assert older.wait() == STOPPED_SAVED
    cluster.release("held")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in (0, 2)] == [1, 1]
