"""Frozen nodes, supervisors and workers: the others continue without them, and they return with their
processes."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, fault

MakeCluster = Callable[..., Cluster]
QUICK = ("--silence", "2", "--lease", "4")


def test_a_frozen_node_is_evicted_and_rejoins_in_process_when_it_resumes(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Supervisor and worker are frozen while the worker is between two sums; when they resume, the world has
    continued."""
    holds = [
        fault("hold", "slot", node=1, step=4, name="held"),
        fault("hold", "slot", node=0, step=8, name="wait"),
    ]
    cluster = make_elastic(options=QUICK).start(faults=holds)
    cluster.until_held()
    frozen = cluster.nodes[1].freeze()
    cluster.until_held("wait")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    cluster.release("held")
    cluster.until_planned("node 1 joined")
    cluster.release("wait")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in range(3)] == [1, 1, 1]
    first = cluster.steps(1)[3]
    assert first > 8 and cluster.steps(1) == [1, 2, 3, *range(first, STEPS + 1)]
    assert (
        next(line["why"] for line in cluster.log("gone") if line["node"] == "1") == "silent"
    )


@pytest.mark.long
def test_a_worker_whose_supervisor_is_frozen_is_excluded_until_it_resumes(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Its worker runs and computes, but receives no messages."""
    holds = [
        fault("hold", "slot", node=0, step=step, name=f"held-{step}") for step in (4, 8)
    ]
    cluster = make_elastic(options=QUICK).start(faults=holds)
    cluster.until_held("held-4")
    cluster.nodes[1].send(signal.SIGSTOP)
    cluster.until_planned("node 1 lost")
    cluster.release("held-4")
    cluster.until_held("held-8")
    cluster.nodes[1].send(signal.SIGCONT)
    cluster.until_planned("node 1 joined")
    cluster.release("held-8")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in range(3)] == [1, 1, 1]
    assert {row["step"] for row in cluster.trace() if row["size"] == 2} >= {5, 6, 7}


def test_a_frozen_worker_is_replaced_by_its_supervisor(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2).start(
        faults=[fault("SIGSTOP", "reducing", node=1, step=4)],
        constants={"evergrad_trainer.node.patience.FROZEN_SECONDS": 5.0},
    )
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1
    assert [
        line["cause"] for line in cluster.log("broken") if line["cause"] != "peer_lost"
    ] == ["stuck"]


def test_a_worker_that_does_not_leave_a_broken_group_is_replaced(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Node 1 is frozen in its computation when node 2 dies: node 0 does not wait for it forever."""
    held = fault("hold", "slot", node=1, step=4, name="held")
    # Long enough for node 0, which has to be out of the broken group by then.
    cluster = make_elastic().start(
        faults=[held], constants={"evergrad_trainer.node.patience.STUCK_SECONDS": 5.0}
    )
    cluster.until_held()
    cluster.nodes[2].kill()
    cluster.finish(nodes=[0, 1])
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1
    assert "stuck" in {line["cause"] for line in cluster.log("broken")}


def test_the_last_worker_with_the_state_gets_all_the_time_it_needs(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Node 1 dies while node 0 computes for longer than the usual limit for a worker: no other node waits for
    node 0."""
    long = fault("hold", "slot", node=0, step=4, seconds=5.0, name="held")
    death = fault("SIGKILL", "tally", node=1, step=4, to="node", name="kill")
    cluster = make_elastic(expect=2).start(
        faults=[long, death],
        constants={"evergrad_trainer.node.patience.STUCK_SECONDS": 1.0},
    )
    cluster.finish(nodes=[0])
    assert cluster.has_happened("held") and cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1, "the state was lost with its last holder"
