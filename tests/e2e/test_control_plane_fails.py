"""The operator, the API server and etcd fail; runs are deleted; the operator is upgraded.

Training is not disturbed.
"""

import time
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import ENDLESS, RESOURCE, Reference, Run, Runs, wait_for
from cluster_shell import Shell
from operator_watch import API_AWAY
from pages import read_commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def uids(run: Run) -> dict[str, str]:
    """Return the uid of all its pods by name."""
    return {
        pod["metadata"]["name"]: pod["metadata"]["uid"]
        for role in ("node", "coordinator")
        for pod in run.pods(role=role)
    }


def start(runs: Runs, name: str) -> Run:
    run = runs.start(name, steps=ENDLESS)
    run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    return run


@pytest.mark.operator_ends
def test_09_a_killed_operator_changes_nothing_and_its_successor_writes_nothing_new(
    runs: Runs, operator: Any, faults: Any, reference: Reference
) -> None:
    run = start(runs, "orphan")
    before = uids(run)
    for _ in range(2):
        operator.kill(faults)
    run.wait_for_step(run.newest_step() + 20)
    assert uids(run) == before
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)


@pytest.mark.long
@pytest.mark.operator_ends
def test_09_an_operator_killed_while_it_creates_a_run_leaves_the_same_children(
    runs: Runs, operator: Any, faults: Any
) -> None:
    for number in range(3):
        run = runs.start(f"early-{number}", steps=ENDLESS)
        time.sleep(0.15 * number)
        operator.kill(faults)
        run.wait_for_pods(0, 1)
        assert sorted(uids(run)) == [
            f"early-{number}-0-0",
            f"early-{number}-1-0",
            f"early-{number}-coordinator-0",
        ]
        runs.kubectl("delete", RESOURCE, run.name, "--wait=false")


@pytest.mark.long
@pytest.mark.operator_ends
def test_the_runbook_shows_the_lease_and_the_last_log_lines_of_an_operator_that_ended(
    cluster: Any, operator: Any, faults: Any, tmp_path: Path
) -> None:
    pod = operator.pod()["metadata"]["name"]
    before = operator.restarts()[pod]
    faults.kill_container(operator.namespace, pod)
    wait_for(lambda: operator.restarts().get(pod, 0) > before, "the container's restart")
    operator.wait_until_ready()
    shell = Shell(cluster, tmp_path)
    look, logs = read_commands("docs/runbooks/TrainingOperatorDown.md")
    shown = shell.run(look)
    assert f"pod/{pod}" in shown and "lease.coordination.k8s.io/evergrad" in shown
    assert shell.run(logs).strip()


@pytest.mark.operator_ends
@pytest.mark.operator_errors(API_AWAY)
def test_11_a_restarted_api_server_and_etcd_do_not_disturb_a_run(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run = start(runs, "undisturbed")
    before, step = uids(run), run.newest_step()
    faults.kill_apiserver()
    time.sleep(2)
    faults.start_apiserver()
    faults.kill_etcd()
    time.sleep(1)
    faults.start_etcd()
    wait_for(lambda: run.newest_step() > step + 20, "more steps")
    assert uids(run) == before
    wait_for(lambda: run.status()["progress"]["step"] > step, "the operator's next status")
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)


# Longer than the lease duration and than kopf's own retries of a request. The fixture checks for every test
# that the operator's container has not restarted.
@pytest.mark.long
@pytest.mark.operator_errors(API_AWAY)
def test_the_operator_survives_two_outages_of_a_minute(
    runs: Runs, operator: Any, faults: Any
) -> None:
    run = start(runs, "outlasting")
    before = operator.restarts()
    for number in range(2):
        step = run.newest_step()
        faults.kill_apiserver()
        time.sleep(60)  # the outage itself
        faults.start_apiserver()

        # The operator is the leader again: newly requested objects are created, and train.
        late = runs.start(f"late-{number}", steps=ENDLESS)
        late.wait_for_pods(0, 1)
        late.wait_for_world(2)
        runs.kubectl("delete", RESOURCE, late.name, "--wait=true")
        wait_for(lambda step=step: run.newest_step() > step + 20, "more steps")
    assert operator.restarts() == before


def test_13_a_deleted_run_ends_gracefully_and_keeps_its_data(runs: Runs) -> None:
    run = start(runs, "deleted")
    directory, step = run.directory(), run.newest_step()
    runs.kubectl("delete", RESOURCE, "deleted", "--wait=true")
    wait_for(lambda: not run.pods() and not run.pods(role="coordinator"), "the pods' end")
    for kind in ("configmaps", "services"):
        wait_for(
            lambda kind=kind: not runs.list(kind, "evergrad.dev/run=deleted"),
            f"the {kind}'s end",
        )
    assert runs.get("persistentvolumeclaims", "deleted") is not None
    saved = [
        int(path.name.split("-")[1].split(".")[0])
        for path in (directory / "checkpoints").glob("step-*")
    ]
    assert max(saved) >= step, "the pods left without saving"


@pytest.mark.long
@pytest.mark.operator_ends
def test_13_a_namespace_is_deleted_while_the_operator_is_gone(
    runs: Runs, operator: Any
) -> None:
    start(runs, "forsaken")
    with operator.gone():
        runs.kubectl("delete", "namespace", runs.namespace, "--wait=true", "--timeout=600s")
        assert runs.kubectl("get", "namespace", runs.namespace, "--ignore-not-found") == ""


@pytest.mark.operator_ends
def test_14_an_upgraded_operator_restarts_no_pod(
    runs: Runs, operator: Any, reference: Reference
) -> None:
    run = start(runs, "upgraded")
    before = uids(run)
    operator.upgrade(trainer_image="localhost/evergrad-trainer:another")
    wait_for(lambda: operator.pod() is not None, "the new operator")
    operator.wait_until_ready()
    try:
        run.wait_for_step(run.newest_step() + 30)
        assert uids(run) == before
        image = run.live_pods()[0]["spec"]["containers"][0]["image"]
        runs.kubectl(
            "delete", "pod", run.live_pods()[1]["metadata"]["name"], "--wait=false"
        )
        successor = wait_for(
            lambda: next(
                (pod for pod in run.pods() if pod["metadata"]["name"] == "upgraded-1-1"),
                None,
            ),
            "its successor",
        )
        assert successor["spec"]["containers"][0]["image"] == image, (
            "an upgrade mixed images in one run"
        )
        run.wait_for_pods(0, 1)
        run.wait_for_world(2)
    finally:
        operator.upgrade()
        operator.wait_until_ready()
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
