"""Recovery over a transport that works as an accelerator's: operations end later, silently, and aborting
clears the groups."""

from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, fault

MakeCluster = Callable[..., Cluster]
ASYNCHRONOUS: dict[str, Any] = {
    "transport": "asynchronous",
    "constants": {"evergrad_trainer.state.transfer._CHUNK_BYTES": 4096},
}


@pytest.mark.parametrize("place", ["slot", "reducing", "update"])
def test_survivors_of_a_killed_node_keep_their_processes_and_their_state(
    make_elastic: MakeCluster, undisturbed: Any, place: str
) -> None:
    death = fault("SIGKILL", place, node=2, step=4, to="node", name="kill")
    cluster = make_elastic().start(faults=[death], **ASYNCHRONOUS)
    cluster.finish(nodes=[0, 1])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert all(len(cluster.pids(node)) == 1 for node in (0, 1))


@pytest.mark.parametrize("place", ["setup", "meeting", "settle"])
def test_a_hard_change_while_the_next_group_forms_kills_no_survivor(
    make_elastic: MakeCluster, undisturbed: Any, place: str
) -> None:
    deaths = [
        fault("SIGKILL", "slot", node=2, step=4, to="node"),
        fault("SIGKILL", place, node=1, step=4, to="node", name="kill"),
    ]
    cluster = make_elastic().start(faults=deaths, **ASYNCHRONOUS)
    cluster.finish(nodes=[0])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert len(cluster.pids(0)) == 1


def test_a_state_whose_source_dies_during_the_transfer_is_not_used(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """Two other nodes hold the state. A joining node that used an incomplete transfer would pass it on to
    them."""
    hold = fault("hold", "slot", node=0, step=4, name="held")
    death = fault("SIGKILL", "send", node=0, call=6, to="node", name="kill")
    cluster = make_elastic().start(faults=[hold, death], **ASYNCHRONOUS)
    cluster.until_held()
    cluster.start_node(3, faults=[death], **ASYNCHRONOUS)
    cluster.until_planned("node 3 joined")
    cluster.release("held")
    cluster.finish(nodes=[1, 2, 3])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"))
    assert all(len(cluster.pids(node)) == 1 for node in (1, 2, 3))


def test_a_joining_node_whose_only_source_dies_midway_starts_with_the_initial_weights(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    hold = fault("hold", "slot", node=0, step=4, name="held")
    death = fault("SIGKILL", "send", node=0, call=6, to="node", name="kill")
    options: Any = {**ASYNCHRONOUS, "sets": ["spec.training.checkpoint.every.steps=100"]}
    cluster = make_elastic(expect=1).start(faults=[hold, death], **options)
    cluster.until_held()
    cluster.start_node(1, **options)
    cluster.until_planned("node 1 joined")
    cluster.release("held")
    cluster.finish(nodes=[1])
    assert cluster.has_happened("kill")
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)
    assert cluster.steps(1) == list(range(1, STEPS + 1))
    assert len(cluster.pids(1)) == 1
