"""Pods of a run and its coordinator are deleted, killed, evicted, preempted and suspended."""

import json
import time
from datetime import datetime
from typing import Any

import pytest
from cluster_runs import (
    CHECKPOINT_INTERVAL,
    ENDLESS,
    GROUP,
    RESOURCE,
    Reference,
    Run,
    Runs,
    make_manifest,
    read_rows,
    wait_for,
)

from evergrad_operator.core.objects.names import LABEL_ROLE as ROLE
from evergrad_operator.core.objects.times import parse_time

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def start(runs: Runs, name: str, **changes: Any) -> Run:
    """A run that trains on two pods and has done some steps."""
    run = runs.start(name, steps=ENDLESS, **changes)
    run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    return run


def continue_training(run: Run, *, steps: int = 20) -> None:
    """Wait until some more steps are trained."""
    run.wait_for_step(run.newest_step() + steps)


def test_02_a_pod_deleted_gracefully_costs_no_step(
    runs: Runs, reference: Reference
) -> None:
    run = start(runs, "graceful")
    victim = run.live_pods()[1]["metadata"]["name"]
    runs.kubectl("delete", "pod", victim, "--wait=false")
    run.wait_for_world(1)
    run.wait_for_attempt(1, 1)
    run.wait_for_world(2)
    continue_training(run)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    wait_for(lambda: run.restarts() == {"Deleted": 1}, "the deletion in the status")
    assert run.status()["failures"]["withoutProgress"] == 0


def test_03_a_killed_container_costs_no_finished_step_and_is_replaced(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run = start(runs, "killed")
    faults.kill_container(runs.namespace, run.live_pods()[0]["metadata"]["name"])
    run.wait_for_world(1)
    run.wait_for_attempt(0, 1)
    run.wait_for_world(2)
    continue_training(run)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    attempt = run.status()["attempts"][-1]
    assert (attempt["pod"], attempt["exitCode"]) == ("killed-0-0", 137)


@pytest.mark.long
def test_the_operator_stays_healthy_for_200_quiet_seconds_after_a_killed_pod(
    runs: Runs, operator: Any, faults: Any
) -> None:
    run = start(runs, "quiet")
    before = operator.restarts()
    faults.kill_container(runs.namespace, run.live_pods()[1]["metadata"]["name"])
    run.wait_for_attempt(1, 1)
    run.wait_for_world(2)
    # Longer than the time after which a watch counts as behind plus that of the liveness probe.
    time.sleep(200)
    assert operator.restarts() == before
    assert operator.is_ready()
    continue_training(run)
    step = run.newest_step()
    wait_for(
        lambda: run.status()["progress"]["step"] >= step,
        "a status that the operator writes still",
    )


def test_04_eviction_and_a_drained_node_move_the_pods_and_the_node_returns(
    runs: Runs, reference: Reference
) -> None:
    run = start(runs, "drained")
    pod = run.live_pods()[1]
    runs.kubectl("create", "--raw", f"/api/v1/namespaces/{runs.namespace}/pods/{pod['metadata']['name']}/eviction", "-f", "-",
                 text=_eviction(runs.namespace, pod["metadata"]["name"]))  # fmt: skip
    wait_for(
        lambda: run.live_pods().get(1, pod)["metadata"]["uid"] != pod["metadata"]["uid"],
        "the evicted pod's successor",
    )
    run.wait_for_world(2)
    node = run.live_pods()[0]["spec"]["nodeName"]
    try:
        chosen = f"--pod-selector=evergrad.dev/run={run.name}"
        options = (
            "--force",
            "--ignore-daemonsets",
            "--delete-emptydir-data",
            "--timeout=600s",
            chosen,
        )
        runs.kubectl("drain", node, *options)
        wait_for(
            lambda: (
                {one["spec"]["nodeName"] for one in run.live_pods().values()}
                == {_other(node)}
            ),
            "pods on the other node",
        )
        run.wait_for_world(2)
    finally:
        runs.kubectl("uncordon", node)
    continue_training(run)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    wait_for(lambda: run.restarts().get("Evicted", 0) >= 2, "both evictions in the status")


def _eviction(namespace: str, pod: str) -> str:
    return f'{{"apiVersion":"policy/v1","kind":"Eviction","metadata":{{"name":"{pod}","namespace":"{namespace}"}}}}'


def _other(node: str) -> str:
    return {"n1": "n2", "n2": "n1"}.get(node, "another node")


def test_06_a_preempted_pod_returns_when_capacity_is_available(
    runs: Runs, reference: Reference
) -> None:
    run = start(
        runs,
        "preempted",
        resources={"requests": {"cpu": "1100m"}},  # more than half a node: one pod on each
        template={"priorityClassName": "evergrad-e2e-low"},
    )
    node = run.live_pods()[1]["spec"]["nodeName"]
    runs.kubectl("apply", "-f", "-", text=_intruder(node))
    wait_for(
        lambda: run.status().get("restarts", {}).get("byCause", {}).get("Preempted"),
        "the preemption in the status",
    )
    run.wait_for_world(1)
    continue_training(run)
    wait_for(lambda: "no node fits" in str(run.status()), "the missing room in the status")
    runs.kubectl("delete", "pod", "intruder", "--now")
    run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    continue_training(run)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)


def _intruder(node: str) -> str:
    return f"""
apiVersion: v1
kind: Pod
metadata: {{name: intruder}}
spec:
  priorityClassName: evergrad-e2e-high
  nodeSelector: {{kubernetes.io/hostname: {node}}}
  automountServiceAccountToken: false
  securityContext: {{runAsNonRoot: true, runAsUser: 10001, seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: pause
    image: localhost/pause:local
    imagePullPolicy: IfNotPresent
    resources: {{requests: {{cpu: 1500m}}}}
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""


def test_07_node_bounds_of_a_training_run_can_be_lowered_and_raised(
    runs: Runs, reference: Reference
) -> None:
    run = start(runs, "resized")
    uid = run.live_pods()[0]["metadata"]["uid"]
    run.patch({"nodes": {"min": 1, "max": 1}})
    run.wait_for_pods(0)
    run.wait_for_world(1)
    run.patch({"nodes": {"min": 1, "max": 2}})
    pods = run.wait_for_pods(0, 1)
    run.wait_for_world(2)
    continue_training(run)
    assert pods[0]["metadata"]["uid"] == uid, "a pod that was to stay was replaced"
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)


@pytest.mark.long
def test_08_a_run_suspends_with_a_checkpoint_and_resumes_at_the_same_step(
    runs: Runs, reference: Reference
) -> None:
    run = start(runs, "suspended")
    run.patch({"suspend": True})
    run.wait_for_phase("Suspended")
    assert run.is_true("Suspended")
    assert run.pods() == [] or not run.live_pods()
    assert run.live_pods(role="coordinator") == {}
    step = run.newest_step()
    assert run.status()["checkpoint"]["step"] == step
    assert any(
        name.startswith(f"step-{step:08d}") or str(step) in name
        for name in run.checkpoints()
    )
    time.sleep(3)
    assert run.newest_step() == step
    run.patch({"suspend": False})
    run.wait_for_pods(0, 1)
    run.wait_for_step(step + 20)
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    generations = list(run.generations())
    assert generations == sorted(generations)


@pytest.mark.long
def test_a_resumed_run_of_three_pods_waits_for_its_pods_and_not_for_a_timer(
    runs: Runs,
) -> None:
    run = runs.start("resumed", steps=ENDLESS, nodes={"min": 1, "max": 3})
    run.wait_for_world(3)
    run.patch({"suspend": True})
    run.wait_for_phase("Suspended")
    step, rows = run.newest_step(), len(run.rows())

    resumed = time.time()
    run.patch({"suspend": False})
    run.wait_for_step(step + 1)
    first = run.rows()[rows]
    print(f"resume: {first['time'] - resumed:.1f} s to the first new step")

    # One pass of the operator creates all pods: the last exists before any of them has reported.
    pods = [*run.live_pods().values(), *run.live_pods(role="coordinator").values()]
    assert len(pods) == 4
    made = [datetime.fromisoformat(pod["metadata"]["creationTimestamp"]) for pod in pods]

    # The coordinator plans as soon as the last node has joined. A wait for a previous group would take its
    # lease of ten seconds, and a wait for missing nodes 30 s.
    (coordinator,) = run.live_pods(role="coordinator").values()
    arguments = coordinator["spec"]["containers"][0]["args"]
    assert "--nothing-runs" in arguments
    assert arguments[arguments.index("--expect") + 1] == "3"
    said = [
        json.loads(line)
        for line in runs.kubectl("logs", coordinator["metadata"]["name"]).splitlines()
        if line.startswith("{")
    ]
    plan = next(one for one in said if one["event"] == "plan")
    hellos = [
        one for one in said if one["event"] == "hello" and one["time"] <= plan["time"]
    ]
    assert max(made).timestamp() <= hellos[0]["time"]
    assert (plan["members"], len({one["node"] for one in hellos})) == (3, 3)
    assert plan["time"] - hellos[-1]["time"] < 5
    assert first["world_size"] == 3, "the first new step is one of all three nodes"
    assert run.repeated_steps() == 0


def test_10_a_killed_coordinator_pod_is_replaced_and_no_step_is_lost(
    runs: Runs, faults: Any, reference: Reference
) -> None:
    run = start(runs, "headless")
    workers = {index: pod["metadata"]["uid"] for index, pod in run.live_pods().items()}
    faults.kill_container(
        runs.namespace, run.live_pods(role="coordinator")[0]["metadata"]["name"]
    )
    continue_training(run)
    first = run.live_pods(role="coordinator")[0]["metadata"]["name"]
    runs.kubectl("delete", "pod", first, "--now")
    wait_for(
        lambda: (
            run.live_pods(role="coordinator")
            .get(0, {})
            .get("metadata", {})
            .get("name", first)
            != first
        ),
        "a new coordinator",
    )
    continue_training(run, steps=60)
    assert {
        index: pod["metadata"]["uid"] for index, pod in run.live_pods().items()
    } == workers
    assert run.repeated_steps() == 0
    run.expect_same_as(reference)
    generations = list(run.generations())
    assert generations == sorted(generations)


@pytest.mark.long
def test_the_time_of_all_pods_is_counted_across_kills_and_deletions(
    runs: Runs, faults: Any
) -> None:
    with runs.watch("pods", f"--selector={ROLE}=node") as events:
        run = start(runs, "counted")
        for index in range(6):
            pods = run.wait_for_pods(0, 1)
            victim = pods[index % 2]["metadata"]
            if index % 3 == 2:
                runs.kubectl("delete", "pod", victim["name"], "--wait=false")
            else:
                faults.kill_container(runs.namespace, victim["name"])
            wait_for(
                lambda uid=victim["uid"], place=index % 2: (
                    run.live_pods().get(place, {}).get("metadata", {}).get("uid")
                    not in (None, uid)
                ),
                "the successor of a pod",
            )
            run.wait_for_world(2)
            continue_training(run)
        run.patch({"suspend": True})
        run.wait_for_phase("Suspended")
        wait_for(lambda: not run.live_pods(), "all pods to be gone")
        wait_for(
            lambda: not {"o", "j"} & set(str(run.status()["memory"].get("usagePods", ""))),
            "the end of all pods in the status",
        )

    # The lifetime of a pod: from its creation to the end of its container, as shown by the API server.
    lives: dict[str, float] = {}
    for event in events:
        pod = event["object"]
        created = parse_time(pod["metadata"]["creationTimestamp"])
        for status in pod["status"].get("containerStatuses", ()):
            ended = status["state"].get("terminated", {}).get("finishedAt")
            if ended is not None:
                lives[pod["metadata"]["uid"]] = parse_time(ended) - created
    lifetime = sum(lives.values())
    usage = run.status()["usage"]
    # The status shows whole seconds; the operator itself counts milliseconds.
    counted = json.loads(run.status()["memory"]["usage"])["pods"]
    assert sum(counted.values()) / 1000 == pytest.approx(lifetime, rel=0.001)
    assert usage["byCause"]["training"] > 0 and usage["byCause"]["startup"] > 0
    wide = runs.kubectl("get", RESOURCE, run.name, "-o", "wide")
    assert "POD-HOURS" in wide and usage["podHours"] in wide
    assert "GPU-HOURS" in wide and usage["waste"] in wide


@pytest.mark.long
def test_a_training_run_restored_without_its_status_resumes_at_its_checkpoint(
    runs: Runs, reference: Reference
) -> None:
    manifest = make_manifest("restored", steps=ENDLESS)
    run = runs.apply(manifest)
    run.wait_for_pods(0, 1)
    run.wait_for_step(CHECKPOINT_INTERVAL + 10)
    wait_for(run.checkpoints, "a checkpoint")

    # Steps do not depend on the operator: without their TrainingRun, the pods continue to train.
    runs.kubectl("delete", RESOURCE, "restored", "--cascade=orphan", "--wait=true")
    volume = runs.volume("restored") / "restored"

    def rows() -> list[dict[str, Any]]:
        return read_rows(volume / "metrics.jsonl")

    orphaned_at = rows()[-1]["step"]
    wait_for(lambda: rows()[-1]["step"] > orphaned_at + 5, "steps without a TrainingRun")

    # Objects without an owner are deleted manually, as docs/operate/storage.md describes; a backup does not
    # contain them.
    selector = f"{GROUP}/run=restored"
    kinds = ("pods", "configmaps", "services", "secrets", "poddisruptionbudgets")
    kinds += ("networkpolicies",)
    runs.kubectl("delete", ",".join(kinds), "-l", selector, "--wait=false")
    wait_for(
        lambda: not any(runs.list(kind, selector) for kind in kinds), "the end of orphans"
    )
    assert runs.get("persistentvolumeclaims", "restored") is not None
    before, saved = (
        rows(),
        max(int(one.name.split("-")[1]) for one in (volume / "checkpoints").glob("step-*")),
    )

    again = runs.apply(manifest)
    again.wait_for_step(before[-1]["step"] + 20)
    after = again.rows()[len(before) :]
    assert min(row["step"] for row in after) > saved
    assert min(row["generation"] for row in after) > max(
        row["generation"] for row in before
    )
    again.expect_same_as(reference)
