"""Losses without a message: frozen agents, agents without their workers, the coordinator, too many nodes."""

import signal
from collections.abc import Callable

import pytest
from rendezvous_cluster import Cluster

from bed.process_state import is_alive

MakeCluster = Callable[..., Cluster]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_frozen_and_orphaned_nodes_are_excluded_and_readmitted(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "2", "--lease", "6", "--silence", "2")
    for node in ("0", "1"):
        cluster.start_agent(node)
    generation = cluster.until_world(2)

    # The agent is frozen, but not its worker: the other node continues, and the worker cannot.
    cluster.freeze(cluster.agent("0").pid)
    generation = cluster.until_world(1, above=generation)
    cluster.thaw(cluster.agent("0").pid)
    generation = cluster.until_world(2, above=generation)
    cluster.check()

    # Both are frozen. On thawing, the worker may find what its peers had sent it, once.
    processes = cluster.agent("1").pid, cluster.worker("1")
    cluster.freeze(*processes)
    generation = cluster.until_world(1, above=generation)
    cluster.thaw(*processes)
    generation = cluster.until_world(2, above=generation)
    cluster.check(is_thaw=True)

    # The agent alone is killed: its worker ends because its peer has left.
    orphan = cluster.worker("1")
    cluster.agent("1").kill()
    cluster.until_world(1, above=generation)
    cluster.until(lambda: not is_alive(orphan), "the orphan's end")

    cluster.finish_training()
    assert cluster.wait_exit("0") == 0
    cluster.check(is_thaw=True)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_coordinator_may_be_lost_with_a_node_or_for_longer_than_the_lease(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "2", "--lease", "6", "--silence", "2")
    for node in ("0", "1"):
        cluster.start_agent(node)
    generation = cluster.until_world(2)

    # With a lost node: after one lease the others continue with a higher number.
    cluster.kill_coordinator()
    cluster.kill_pod("0")
    cluster.start_coordinator()
    generation = cluster.until_world(1, above=generation)
    cluster.start_agent("0")
    generation = cluster.until_world(2, above=generation)

    # Longer than the lease: the workers are stopped, the agents wait.
    cluster.kill_coordinator()
    workers = {cluster.worker(node) for node in ("0", "1")}
    cluster.until(lambda: not any(map(is_alive, workers)), "the end of the workers")
    assert cluster.is_running("0")
    assert cluster.is_running("1")
    cluster.start_coordinator()
    cluster.until_world(2, above=generation)

    cluster.finish_training()
    assert [cluster.wait_exit(node) for node in ("0", "1")] == [0, 0]
    cluster.check()


def test_a_coordinator_whose_pod_is_lost_costs_fresh_workers_no_step(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "2", "--lease", "60")
    for node in ("0", "1"):
        cluster.start_agent(node)
    generation = cluster.until_world(2)
    workers = {cluster.worker(node) for node in ("0", "1")}

    # The next coordinator has another epoch, and no state.
    cluster.kill_coordinator()
    (cluster.directory / "generation").unlink()
    cluster.start_coordinator("--epoch", "1")
    cluster.until(lambda: cluster.status()["phase"] == "Running", "the adoption")
    num_steps = len(cluster.steps())
    cluster.until(lambda: len(cluster.steps()) > num_steps + 20, "further steps")
    assert {step.process for step in cluster.steps()} == workers
    assert {step.generation for step in cluster.steps()} == {generation}

    # It rules from here on, in its own numbers.
    cluster.kill_pod("0")
    assert cluster.until_world(1, above=generation) >> 32 == 1
    cluster.finish_training()
    assert cluster.wait_exit("1") == 0
    cluster.check()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_below_the_minimum_the_others_wait_and_a_node_has_one_process(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "2", "--max", "2")
    for node in ("0", "1"):
        cluster.start_agent(node)
    generation = cluster.until_world(2)

    # Below min: the other one's worker is stopped, its agent waits until there are enough again.
    worker = cluster.worker("1")
    cluster.kill_pod("0")
    cluster.until(
        lambda: cluster.status()["phase"] == "Waiting", "the word that nodes are missing"
    )
    cluster.until(lambda: not is_alive(worker), "the end of the worker")
    assert cluster.is_running("1")
    cluster.start_agent("0")
    generation = cluster.until_world(2, above=generation)

    # The same index twice: the newer process takes its place, the older one ends with 75.
    older = cluster.agent("0")
    cluster.start_agent("0")
    assert older.wait(60) == 75
    cluster.until_world(2, above=generation)
    assert "a newer process of this node" in cluster.log("agent-0")

    # One is killed after its workers have ended well: that changes nothing any more.
    (cluster.directory / "linger-1").touch()
    cluster.finish_training()
    cluster.until(
        lambda: "node 0 has finished training" in cluster.log("agent-0"),
        "the end of node 0's worker",
    )
    cluster.until(lambda: cluster.count("done") == 1, "the exit barrier")
    cluster.agent("0").send_signal(signal.SIGKILL)
    (cluster.directory / "linger-1").unlink()
    assert cluster.wait_exit("1") == 0
    cluster.check()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_joins_are_held_until_a_checkpoint_and_a_late_crash_restarts_one_node_alone(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "3", "--expect", "2", "--hold-joins")
    for node in ("0", "1"):
        cluster.start_agent(node)
    generation = cluster.until_world(2)

    # A join waits for a checkpoint as long as the requested number of nodes trains.
    cluster.start_agent("2")
    cluster.until(lambda: cluster.status()["nodes"]["ready"] == 3, "the third node")
    seen = len(cluster.steps())
    cluster.until(lambda: len(cluster.steps()) > seen + 20, "ten more steps")
    assert {step.generation for step in cluster.steps()} == {generation}
    (cluster.directory / "boundary").touch()
    generation = cluster.until_world(3, above=generation)

    # The last worker crashes when its peers have ended well: it starts again, alone, and the run ends well.
    (cluster.directory / "linger-2").touch()
    (cluster.directory / "crash-2").touch()
    cluster.finish_training()
    for node in ("0", "1"):
        cluster.until(
            lambda node=node: "has finished training" in cluster.log(f"agent-{node}"),
            f"the end of node {node}'s worker",
        )
    cluster.until(lambda: cluster.count("done") == 2, "the exit barrier")
    (cluster.directory / "linger-2").unlink()
    assert [cluster.wait_exit(node) for node in ("0", "1", "2")] == [0, 0, 0]
    assert {
        step.world_size for step in cluster.steps() if step.generation > generation
    } == {1}
    cluster.check()


@pytest.mark.timeout(3600)
def test_a_refused_agent_exits_with_70_and_invalid_arguments_with_64(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("--min", "1", "--max", "1")
    cluster.start_agent("0", options=["--rdzv-id=another"])
    assert cluster.wait_exit("0") == 70, "it concerns that node, never the run"
    assert "another" in cluster.log("agent-0")
    cluster.start_agent("1", options=["--rdzv-endpoint=nonsense", "--rdzv-conf=colour=red"])
    assert cluster.wait_exit("1") == 64
    assert "--rdzv-endpoint 'nonsense': not HOST:PORT." in cluster.log("agent-1")
    assert "--rdzv-conf colour: no such key." in cluster.log("agent-1")
