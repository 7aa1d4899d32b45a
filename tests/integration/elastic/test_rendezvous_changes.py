"""Changes of a group of torchrun agents: joins, departures, and that no node ever trains in two groups."""

import os
import signal
from collections.abc import Callable

import pytest
from rendezvous_cluster import Cluster

MakeCluster = Callable[..., Cluster]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_nodes_join_and_leave_and_the_run_ends_with_exit_code_0(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "3", "--start-wait", "30")
    for node in ("0", "1", "2"):
        cluster.start_agent(node)
    first = cluster.until_world(3)

    # A worker is killed: all nodes continue together.
    os.kill(cluster.worker("1"), signal.SIGKILL)
    second = cluster.until_world(3, above=first)
    assert cluster.status()["restarts"].get("worker_crash") == 1
    failure = cluster.status()["lastFailure"]
    assert failure["rank"] == 1
    assert failure["exitCode"] in (
        -signal.SIGKILL,
        None,
    )  # None: the agent was quicker to collect it

    # Rank 0's pod is killed: the others continue.
    cluster.kill_pod("0")
    third = cluster.until_world(2, above=second)

    # A spare above max changes nothing until it takes over.
    cluster.start_agent("0")
    fourth = cluster.until_world(3, above=third)
    cluster.start_agent("10")
    cluster.until(lambda: cluster.count("spare") == 1, "the spare")
    assert {step.node for step in cluster.steps()} == {"0", "1", "2"}
    cluster.kill_pod("1")
    fifth = cluster.until_world(3, above=fourth)
    assert fifth == fourth + 1
    assert {step.node for step in cluster.steps() if step.generation == fifth} == {
        "0",
        "2",
        "10",
    }

    # A pod is asked to go.
    cluster.agent("2").terminate()
    sixth = cluster.until_world(2, above=fifth)
    assert cluster.wait_exit("2") == 1
    assert cluster.status()["restarts"].get("node_left") == 1

    # The coordinator is killed and restarts: no worker restarts.
    workers = {node: cluster.worker(node) for node in ("0", "10")}
    cluster.kill_coordinator()
    cluster.start_coordinator()
    cluster.until(lambda: cluster.status()["phase"] == "Running", "the adoption")
    assert cluster.status()["generation"] == sixth
    assert {node: cluster.worker(node) for node in workers} == workers

    # One finishes early, the other later; both end successfully, and so does a node that joins after the end.
    (cluster.directory / "linger-10").touch()
    cluster.finish_training()
    cluster.until(
        lambda: "node 0 has finished training" in cluster.log("agent-0"),
        "the end of node 0",
    )
    assert cluster.is_running("0")
    (cluster.directory / "linger-10").unlink()
    assert cluster.wait_exit("0") == 0
    assert cluster.wait_exit("10") == 0
    cluster.start_agent("7")
    assert cluster.wait_exit("7") == 0
    cluster.check()
