"""The coordinator dies: alone, with a node, with all nodes, and for longer than the lease."""

import json
import os
import signal
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from elastic_helpers import STEPS, Cluster, fault
from patience import PATIENCE
from run_helpers import STOPPED_SAVED, checkpoints, events, steps_of

MakeCluster = Callable[..., Cluster]


def kill_coordinator(cluster: Cluster) -> None:
    assert cluster.coordinator is not None
    cluster.coordinator.kill()


@pytest.mark.parametrize("is_pod_lost", [False, True])
def test_training_continues_without_the_coordinator_and_the_next_one_adopts_the_group(
    make_elastic: MakeCluster, undisturbed: Any, is_pod_lost: bool
) -> None:
    holds = [
        fault("hold", "slot", node=0, step=step, name=f"held-{step}") for step in (4, 8)
    ]
    cluster = make_elastic().start(faults=holds)
    cluster.until_held("held-4")
    kill_coordinator(cluster)
    cluster.release("held-4")
    cluster.until_held("held-8")
    if is_pod_lost:
        (cluster.path / "generation").unlink()
        cluster.options += ("--epoch", "1")
    cluster.start_coordinator()
    cluster.until(lambda: cluster.log("adopted"), "the adoption")
    cluster.release("held-8")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert len({row["generation"] for row in cluster.trace()}) == 1, "nobody has noticed"


def test_coordinator_and_a_node_lost_together_cost_no_finished_step(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(options=("--lease", "2")).start(
        faults=[fault("hold", "slot", node=0, step=4, name="held")]
    )
    cluster.until_held()
    kill_coordinator(cluster)
    cluster.nodes[2].kill()
    cluster.release("held")
    cluster.start_coordinator()
    cluster.finish(nodes=[0, 1])
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in (0, 1)] == [1, 1]
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


def test_if_all_processes_are_lost_the_run_resumes_at_the_newest_checkpoint(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    holds = [fault("hold", "slot", node=0, step=9, name="held")]
    cluster = make_elastic(options=("--lease", "2")).start(faults=holds)
    cluster.until_held()
    cluster.until(lambda: checkpoints(cluster.directory) == [5], "the checkpoint")
    kill_coordinator(cluster)
    for node in cluster.nodes.values():
        node.kill()
    cluster.start()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)
    assert steps_of(cluster.directory) == [*range(1, 9), *range(6, STEPS + 1)]


def damage_newest(cluster: Any) -> None:
    """End a run of which step-10 is the newest checkpoint, and cut that off."""
    cluster.until_held()
    cluster.until(lambda: checkpoints(cluster.directory) == [5, 10], "two checkpoints")
    kill_coordinator(cluster)
    for node in cluster.nodes.values():
        node.kill()
    shard = cluster.directory / "checkpoints" / "step-10" / "rank-00000.bin"
    os.truncate(shard, shard.stat().st_size - 1)


def check_fallback(cluster: Any) -> None:
    """Every event of this change is the same, because a new rank 0 does not know what the previous one has
    written."""
    found = events(cluster.directory, "fallback")
    assert found and all(one["checkpoint"] == "step-10" for one in found)


@pytest.mark.parametrize("place", ["announce", "provenance"])
def test_a_fallback_is_recorded_if_rank_0_is_lost_before_it_has_written_it(
    make_elastic: MakeCluster, undisturbed: Any, place: str
) -> None:
    holds = [fault("hold", "slot", node=0, step=12, name="held")]
    # Both nodes are in every group, even if one of them starts late.
    options = {"expect": 2, "min_nodes": 2, "options": ("--lease", "2")}
    cluster = make_elastic(**options).start(faults=holds)
    damage_newest(cluster)

    cluster.start(faults=[fault("SIGKILL", place, to="node", name="kill")])
    lost = cluster.until(
        lambda: [index for index, node in cluster.nodes.items() if node.poll() is not None],
        "the end of a node",
    )
    assert cluster.has_happened("kill")
    cluster.start_node(lost[0])
    cluster.finish()
    check_fallback(cluster)
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)


def test_a_fallback_is_recorded_if_the_only_process_is_lost_before_it_has_written_it(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    holds = [fault("hold", "slot", node=0, step=12, name="held")]
    options = ("--lease", "2")
    cluster = make_elastic(expect=1, options=options).start(faults=holds)
    damage_newest(cluster)

    cluster.start(faults=[fault("SIGKILL", "announce", to="node", name="kill")])
    cluster.nodes[0].wait()
    cluster.start_node(0)
    cluster.finish()
    assert cluster.has_happened("kill")
    check_fallback(cluster)
    cluster.check(undisturbed.at("undisturbed"), is_state_lost=True)


def test_without_a_coordinator_for_longer_than_the_lease_training_pauses_in_its_processes(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    slow = fault("hold", "slot", node=0, is_repeated=True, seconds=0.2, name="slow")
    cluster = make_elastic(options=("--lease", "1")).start(faults=[slow])
    cluster.until_step(1)
    kill_coordinator(cluster)
    cluster.until(lambda: cluster.is_paused(seconds=2), "the pause")
    assert cluster.trace()[-1]["step"] < STEPS
    cluster.release("slow")
    cluster.start_coordinator()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in range(3)] == [1, 1, 1]
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


def test_a_group_that_broke_while_the_coordinator_was_away_is_not_adopted(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    """All nodes work and reconnect; only their workers know that their group has ended."""
    faults = [
        fault("hold", "slot", node=0, step=4, name="held"),
        fault("lose", "update", node=1, step=4, name="lose"),
    ]
    cluster = make_elastic(options=("--lease", "2")).start(faults=faults)
    cluster.until_held()
    kill_coordinator(cluster)
    cluster.release("held")
    cluster.until(
        lambda: cluster.is_paused(seconds=0.5) and cluster.has_happened("lose"),
        "the end of the group",
    )
    cluster.start_coordinator()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert [len(cluster.pids(node)) for node in range(3)] == [1, 1, 1]


def test_nodes_that_must_drain_while_the_coordinator_is_away_save_on_their_own(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2, options=("--lease", "2")).start(
        faults=[fault("hold", "slot", node=0, step=4, name="held")]
    )
    cluster.until_held()
    kill_coordinator(cluster)
    for node in cluster.nodes.values():
        node.send(signal.SIGTERM)
    # Not before they have noticed that no coordinator responds.
    cluster.until(lambda: cluster.is_paused(seconds=5.0), "a while")
    cluster.release("held")
    cluster.finish(STOPPED_SAVED)
    last = steps_of(cluster.directory)[-1]
    assert checkpoints(cluster.directory)[-1] == last < STEPS
    cluster.start()
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
    assert steps_of(cluster.directory) == list(range(1, STEPS + 1))


def test_the_page_of_a_run_shows_the_reports_of_rank_0_and_the_training_nodes(
    make_elastic: MakeCluster, undisturbed: Any
) -> None:
    cluster = make_elastic(expect=2).start(
        faults=[fault("hold", "slot", node=0, step=8, name="held")]
    )
    cluster.until_held()
    port = json.loads((cluster.path / "address.json").read_text())["statusPort"]
    shown: dict[str, Any] = {}

    def is_shown() -> bool:
        """Return the content that a newly opened page receives first."""
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/live", timeout=PATIENCE
        ) as events:
            events.readline()
            shown.update(json.loads(events.readline().removeprefix(b"data: ")))
        return (
            shown["status"]["step"] == 7 and shown.get("steps", {}).get("x", [0])[-1] == 7
        )

    cluster.until(is_shown, "the newest step on the page")
    assert set(shown["steps"]["columns"]) >= {"loss", "learning_rate", "grad_norm"}
    assert shown["times"]["columns"]["processes"][2][-1] == 2
    assert [event for _, event, _ in shown["events"]][:2] == ["hello", "hello"]
    assert {one["state"] for one in shown["status"]["nodes"]["members"]} == {"running"}
    cluster.release("held")
    cluster.finish()
    cluster.check(undisturbed.at("undisturbed"))
