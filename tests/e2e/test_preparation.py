"""A separate pod prepares the data of a run before any node is created, and another run on the same volume
uses the same data."""

import json

import pytest
from cluster_runs import Runs

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]
SECTION = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}


def test_a_pod_prepares_then_nodes_train_and_a_second_run_reuses_the_data(
    runs: Runs,
) -> None:
    first = runs.start("prepared-one", steps=20, preparation=SECTION)
    first.wait_for_phase("Complete")
    (pod,) = first.pods(role="preparation")
    assert pod["status"]["phase"] == "Succeeded"
    made = pod["status"]["containerStatuses"][0]["state"]["terminated"]["finishedAt"]
    for node in first.pods():
        assert node["metadata"]["creationTimestamp"] >= made
    assert first.status()["preparation"]["work"] == "done"

    claim = {"size": None, "claimName": "prepared-one"}
    second = runs.start("prepared-two", steps=20, preparation=SECTION, storage=claim)
    second.wait_for_phase("Complete")
    (pod,) = second.pods(role="preparation")
    said = runs.kubectl("logs", pod["metadata"]["name"])
    assert "(prepared before)" in said
    shared = [
        one
        for one in (runs.volume("prepared-one") / ".prepared").iterdir()
        if one.name[0] != "."
    ]
    assert len(shared) == 1, [one.name for one in shared]


def test_a_mistake_in_the_data_fails_the_run_before_a_node_is_requested(runs: Runs) -> None:
    sources = [{"name": "docs", "type": "jsonl", "path": "/documents/nowhere.jsonl"}]
    run = runs.start(
        "unprepared", steps=20, preparation=SECTION, training={"data": {"sources": sources}}
    )
    run.wait_for_phase("Failed")
    condition = run.condition("Failed")
    assert condition["reason"] == "UserError"
    assert "exit code 64" in condition["message"]
    assert "/documents/nowhere.jsonl" in condition["message"]
    events = json.dumps(runs.list("events"))
    assert "unprepared-0-0" not in events and "unprepared-coordinator" not in events
