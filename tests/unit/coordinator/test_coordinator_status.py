"""The responses of /status and /metrics."""

import json

from simulated_cluster import Cluster, make_settings

from evergrad_common.metrics import COORDINATOR
from evergrad_coordinator.protocol import Broken, Progress, Result
from evergrad_coordinator.rules.status import (
    MAX_LISTED,
    EdgeFacts,
    build_metrics,
    build_status,
)

EDGE = EdgeFacts(
    connections=3,
    connections_total=5,
    messages_total=40,
    internal_errors_total=0,
    journal_failures_total=0,
    journal_writable=1,
    rejected_total={"malformed": 2},
)


def start_running(number: int = 3) -> Cluster:
    cluster = Cluster(make_settings(expect=number, max_nodes=number))
    for name in range(number):
        cluster.start(name)
    cluster.run_until_running()
    return cluster


def test_the_status_describes_a_running_group() -> None:
    cluster = start_running()
    node = cluster.nodes[0]
    node.send(
        Progress(
            1,
            40,
            total_steps=100,
            loss=2.5,
            tokens_per_second=9.0,
            eta_seconds=3.0,
            checkpoint_step=30,
        )
    )
    status = build_status(cluster.group, now=cluster.now + 2)
    assert json.loads(json.dumps(status, allow_nan=False)) == status
    assert (status["phase"], status["generation"], status["worldSize"]) == ("Running", 1, 3)
    assert (
        status["step"],
        status["totalSteps"],
        status["loss"],
        status["checkpointStep"],
    ) == (
        40,
        100,
        2.5,
        30,
    )
    assert status["updatedSecondsAgo"] == 2
    assert status["nodes"]["members"][1] == {
        "node": "1",
        "firstRank": 1,
        "workers": 1,
        "state": "running",
        "address": "10.0.0.1",
    }
    assert status["lastFailure"] is None
    assert status["maxFailures"] == cluster.group.settings.max_failures_without_progress


def test_unknown_values_are_null() -> None:
    status = build_status(Cluster().group, now=1000.0)
    assert [
        status[key]
        for key in ("step", "totalSteps", "loss", "checkpointStep", "updatedSecondsAgo")
    ] == [None] * 5
    assert status["phase"] == "Waiting"


def test_members_are_listed_up_to_a_bound_and_counted() -> None:
    cluster = start_running(MAX_LISTED + 6)
    nodes = build_status(cluster.group, now=cluster.now)["nodes"]
    assert len(nodes["members"]) == MAX_LISTED
    assert nodes["numMembers"] == MAX_LISTED + 6


def test_the_status_has_the_last_failure() -> None:
    cluster = start_running()
    cluster.nodes[1].send(
        Broken(
            1,
            "out_of_memory",
            rank=1,
            step=7,
            exit_code=-9,
            message="killed",
            time_since=1.0,
        )
    )
    failure = build_status(cluster.group, now=cluster.now)["lastFailure"]
    assert failure == {
        "generation": 1, "cause": "out_of_memory", "node": "1", "rank": 1, "step": 7, "exitCode": -9, "message": "killed",
        "secondsAgo": 1.0, "withoutProgress": 1,
    }  # fmt: skip


def test_an_ongoing_outage_is_already_counted() -> None:
    cluster = start_running(2)
    cluster.nodes[1].die()
    cluster.run(5)
    lost = build_status(cluster.group, now=cluster.now)["lostSeconds"]
    assert 4 < lost["node_lost"] < 6


def test_a_group_that_trains_again_with_a_returned_member_loses_no_more_time() -> None:
    cluster = start_running()
    node = cluster.nodes[1]
    # It is back before a review, so that no other group is planned.
    node.disconnect()
    node.connect()
    cluster.run(20)
    status = build_status(cluster.group, now=cluster.now)
    assert (status["generation"], status["restarts"]) == (1, {})
    assert status["lostSeconds"]["node_lost"] < 1


def test_a_group_whose_connections_were_all_lost_has_not_restarted() -> None:
    cluster = start_running()
    for node in cluster.nodes:
        node.disconnect()
    cluster.run(20)
    status = build_status(cluster.group, now=cluster.now)
    assert (status["phase"], status["generation"]) == ("Running", 1)
    assert status["restarts"] == {}
    assert status["lostSeconds"]["node_lost"] < 1


def test_the_time_after_the_end_of_a_run_is_not_lost() -> None:
    complete, failed = start_running(), start_running()
    complete.nodes[0].send(Result(1, 100))
    failed.nodes[1].send(
        Broken(1, "user_error", rank=1, exit_code=64, is_final=True, time_since=0.5)
    )
    for cluster in (complete, failed):
        cluster.run(20)
    assert build_status(complete.group, now=complete.now)["lostSeconds"] == {}
    assert build_status(failed.group, now=failed.now)["lostSeconds"] == {"user_error": 0.5}


def test_metrics_are_in_the_prometheus_text_format() -> None:
    cluster = start_running()
    cluster.nodes[1].die()
    cluster.run(3)
    text = build_metrics(cluster.group, EDGE, now=cluster.now)
    lines = text.splitlines()
    assert 'evergrad_run_phase{phase="Running"} 1' in lines
    assert 'evergrad_run_restarts_total{cause="node_lost"} 1' in lines
    assert 'evergrad_coordinator_rejected_total{reason="malformed"} 2' in lines
    assert "# TYPE evergrad_run_restarts_total counter" in lines
    assert all(
        line.startswith(("#", "evergrad_run_", "evergrad_coordinator_")) for line in lines
    )


def test_the_exported_metrics_match_the_catalogue() -> None:
    cluster = start_running()
    cluster.nodes[0].send(
        Progress(
            1, step=3, total_steps=9, loss=2.5, tokens_per_second=10.0, checkpoint_step=2
        )
    )
    text = build_metrics(cluster.group, EDGE, now=cluster.now)
    kinds = [tuple(line.split(" ")[2:4]) for line in text.splitlines() if "# TYPE" in line]
    assert kinds == [(one.exported, one.kind) for one in COORDINATOR]
    # A counter of a server without an entry would be missing without an error.
    ours = {one.name for one in COORDINATOR if one.name.startswith("coordinator_")}
    assert ours == {f"coordinator_{name}" for name in vars(EDGE)}
    helps = [line.split(" ", 3)[2:4] for line in text.splitlines() if "# HELP" in line]
    assert helps == [[one.exported, f"{one.help}."] for one in COORDINATOR]


def test_a_number_that_was_never_reported_is_omitted() -> None:
    text = build_metrics(start_running().group, EDGE, now=0.0)
    assert "evergrad_run_loss" not in text
    assert "evergrad_run_steps" not in text
