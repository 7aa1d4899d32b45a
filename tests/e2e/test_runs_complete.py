"""Runs from start to end: the quickstart, a finished run, a script, and two runs that use one directory."""

import json
import subprocess
import time
from typing import Any

import pytest
from cluster_runs import ENDLESS, QUICKSTART, RESOURCE, ROOT, Runs, make_manifest, wait_for
from patience import PATIENCE

from bed.places import SINGLE_CLASS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def test_01_the_quickstart_completes_on_single_node_volumes_and_a_second_apply_does_nothing(
    runs: Runs, cluster: Any
) -> None:
    import yaml

    manifest = yaml.safe_load((QUICKSTART / "trainingrun.yaml").read_text("utf-8"))
    if cluster.is_bed:
        manifest["spec"]["storage"]["storageClassName"] = SINGLE_CLASS
    runs.kubectl("apply", "-f", str(QUICKSTART / "documents.yaml"))
    runs.kubectl("apply", "-f", "-", text=json.dumps(manifest))
    run = runs.adopt("quickstart")
    runs.kubectl(
        "wait", "--for=condition=Complete", "trun/quickstart", "--timeout=600s", seconds=620
    )
    status = run.status()
    assert status["phase"] == "Complete"
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 200
    files = {path.name for path in run.directory().iterdir()}
    assert {
        "run.json",
        "provenance.json",
        "metrics.jsonl",
        "events.jsonl",
        "report.html",
        "report.md",
        "complete.json",
    } <= files
    assert run.checkpoints()
    wait_for(
        lambda: not run.live_pods() and not run.pods(role="coordinator"), "the pods' end"
    )

    def is_settled() -> bool:
        # The operator records the cost of a pod's end after that end.
        version = run.get()["metadata"]["resourceVersion"]
        time.sleep(5)
        return bool(run.get()["metadata"]["resourceVersion"] == version)

    wait_for(is_settled, "the pods' end in the status")
    assert run.status()["nodes"].get("running", 0) == 0
    before = (
        run.get()["metadata"]["resourceVersion"],
        [pod["metadata"]["uid"] for pod in run.pods()],
        len(run.rows()),
    )
    runs.kubectl("apply", "-f", "-", text=json.dumps(manifest))
    time.sleep(5)
    after = run.get()
    assert after["metadata"]["generation"] == 1
    assert (
        after["metadata"]["resourceVersion"],
        [pod["metadata"]["uid"] for pod in run.pods()],
        len(run.rows()),
    ) == before
    assert manifest["metadata"]["name"] == "quickstart"


def test_15_a_finished_run_restored_without_status_is_complete_again_without_a_pod(
    runs: Runs,
) -> None:
    run = runs.start("restored", steps=20)
    run.wait_for_phase("Complete")
    rows = len(run.rows())
    manifest = run.get()
    runs.kubectl("delete", RESOURCE, "restored", "--wait=true")
    wait_for(
        lambda: not run.pods() and not run.pods(role="coordinator"),
        "the garbage collection",
    )
    clean = {key: manifest[key] for key in ("apiVersion", "kind", "spec")} | {
        "metadata": {"name": "restored"}
    }
    runs.apply(clean)
    status = run.wait_for_phase("Complete")
    assert run.condition("Complete")["reason"] == "AlreadyComplete"
    time.sleep(3)
    assert run.pods() == [] and run.pods(role="coordinator") == []
    assert len(run.rows()) == rows
    assert status["progress"]["step"] == 20


def test_after_its_time_to_live_only_the_run_and_its_data_remain(runs: Runs) -> None:
    # Enough steps that the run trains while its children are checked, one kind after the other.
    run = runs.start("short-lived", steps=600)
    selector = "evergrad.dev/run=short-lived"
    kinds = ("pods", "configmaps", "services", "poddisruptionbudgets", "networkpolicies")
    seen: set[str] = set()

    def has_all() -> bool:
        seen.update(kind for kind in kinds if runs.list(kind, selector))
        return seen == set(kinds)

    wait_for(has_all, "a child of each kind")
    run.patch({"ttlSecondsAfterFinished": 2})
    run.wait_for_phase("Complete")
    wait_for(
        lambda: not any(runs.list(kind, selector) for kind in kinds),
        "the end of the children",
    )
    assert runs.get("persistentvolumeclaims", "short-lived") is not None
    assert run.status()["phase"] == "Complete"
    assert (run.directory() / "complete.json").exists()


def test_16_an_unmodified_ddp_script_survives_a_killed_pod(runs: Runs, faults: Any) -> None:
    script = (ROOT / "examples/scripts/ddp.py").read_text()
    runs.kubectl("create", "configmap", "script", f"--from-literal=ddp.py={script}")
    manifest = make_manifest("script", steps=1)
    del manifest["spec"]["training"]
    manifest["spec"]["script"] = {
        "command": [
            "/script/ddp.py",
            "--output",
            "output",
            "--steps",
            "300",
            "--step-seconds",
            "0.1",
        ]
    }
    manifest["spec"]["template"] = {
        "volumes": [{"name": "script", "configMap": {"name": "script"}}],
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    }
    run = runs.apply(manifest)
    pods = run.wait_for_pods(0, 1)
    wait_for(
        lambda: run.status().get("nodes", {}).get("running") == 2, "both nodes in the group"
    )
    wait_for(
        lambda: any(run.directory().rglob("checkpoint.pt")), "the script's first checkpoint"
    )
    faults.kill_container(runs.namespace, pods[1]["metadata"]["name"])
    status = run.wait_for_phase("Complete")
    assert sum(status["restarts"]["byCause"].values()) >= 1


NOT_NUMBERS = """
import math, time
from evergrad import elastic

for step in range(30):
    loss = [math.nan, math.inf, -math.inf][step % 3]
    elastic.report(step, total_steps=30, loss=loss, tokens_per_second=loss)
    time.sleep(0.2)
"""


def test_a_script_that_reports_only_non_finite_numbers_runs_to_its_end(runs: Runs) -> None:
    runs.kubectl(
        "create", "configmap", "script", f"--from-literal=diverges.py={NOT_NUMBERS}"
    )
    run = runs.start(
        "diverges",
        steps=1,
        training=None,
        script={"command": ["/script/diverges.py"]},
        template={
            "volumes": [{"name": "script", "configMap": {"name": "script"}}],
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        },
    )
    run.wait_for_phase("Complete")
    assert run.restarts() == {}, "the script was started again"


def test_18_a_second_run_on_the_same_path_is_refused(runs: Runs) -> None:
    runs.kubectl(
        "apply", "-f", "-", text=json.dumps(_claim("common", runs.cluster.storage_class))
    )
    first = runs.start(
        "first",
        steps=ENDLESS,
        storage={"size": None, "claimName": "common", "path": "experiment"},
    )
    first.wait_for_step(5)
    second = runs.start(
        "second",
        steps=ENDLESS,
        storage={"size": None, "claimName": "common", "path": "experiment"},
    )
    status = second.wait_for_phase("Failed")
    assert second.condition("Failed")["reason"] == "OutputConflict"
    assert "first" in status["message"] and "experiment" in status["message"]
    assert second.pods() == [] and second.pods(role="coordinator") == []
    first.wait_for_step(first.newest_step() + 10)


def _claim(name: str, storage_class: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": storage_class,
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }


def test_kubectl_shows_the_progress_of_a_run(runs: Runs) -> None:
    """The rows of what users expect of kubectl: wait for Failed, logs by label, get -w with few lines, events
    in order."""
    run = runs.start("watched", steps=150)
    watch = subprocess.Popen(
        [
            str(runs.cluster.kubectl),
            "--kubeconfig",
            str(runs.cluster.kubeconfig),
            "-n",
            runs.namespace,
            "get",
            RESOURCE,
            "watched",
            "-w",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        began = time.monotonic()
        run.wait_for_step(20)
        assert "step" in runs.kubectl(
            "logs", "-l", "evergrad.dev/run=watched,evergrad.dev/index=0", "--tail=-1"
        )
        run.wait_for_phase("Complete")
        seconds = time.monotonic() - began
    finally:
        watch.terminate()
        lines = watch.communicate(timeout=PATIENCE)[0].splitlines()
    assert lines[0].split()[:4] == ["NAME", "PHASE", "NODES", "STEP"]
    phases = len({line.split()[1] for line in lines[1:]})
    assert len(lines) - 1 <= seconds / 10 + 2 * phases + 2, "\n".join(lines)
    told = [
        event
        for event in runs.list("events")
        if event["involvedObject"]["kind"] == "TrainingRun"
    ]
    reasons = [
        event["reason"]
        for event in sorted(told, key=lambda one: int(one["metadata"]["resourceVersion"]))
    ]
    assert len(reasons) == len(set(reasons)) and reasons[-1] == "Complete", reasons


@pytest.mark.long
def test_a_volume_is_deleted_with_its_run_on_request_and_the_request_may_change(
    runs: Runs,
) -> None:
    run = runs.start("passing", steps=ENDLESS, storage={"whenDeleted": "Delete"})

    def owners() -> list[str]:
        claim = runs.get("persistentvolumeclaims", "passing") or {"metadata": {}}
        found = claim["metadata"].get("ownerReferences") or []
        return [str(owner["uid"]) for owner in found]

    uid = run.get()["metadata"]["uid"]
    wait_for(lambda: owners() == [uid], "the claim's owner")
    run.patch({"storage": {"whenDeleted": "Retain"}})
    wait_for(lambda: owners() == [], "the claim without an owner")
    run.patch({"storage": {"whenDeleted": "Delete"}})
    wait_for(lambda: owners() == [uid], "the claim's owner again")
    runs.kubectl("delete", RESOURCE, "passing", "--wait=true")
    wait_for(
        lambda: runs.get("persistentvolumeclaims", "passing") is None,
        "the end of the claim",
    )


@pytest.mark.long
@pytest.mark.operator_ends
def test_a_run_deletes_itself_after_its_time_to_live_only_if_the_installation_allows_it(
    runs: Runs, operator: Any
) -> None:
    manifest = make_manifest(
        "passing-by", steps=20, changes={"ttlSecondsAfterFinished": 1, "ttlDeletes": "Run"}
    )
    with pytest.raises(AssertionError, match=r"runs\.allowed\.deletion"):
        runs.apply(manifest)
    operator.upgrade(settings=["runs.allowed.deletion=true"])
    try:
        runs.apply(manifest)
        wait_for(
            lambda: runs.get("trainingruns", "passing-by") is None,
            "the run's end",
            seconds=PATIENCE,
        )
        selector = "evergrad.dev/run=passing-by"
        kinds = ("pods", "configmaps", "services", "secrets", "networkpolicies")
        wait_for(
            lambda: not any(runs.list(kind, selector) for kind in kinds),
            "the children's end",
        )
        claim = runs.get("persistentvolumeclaims", "passing-by") or {}
        assert (
            '"complete"' in claim["metadata"]["annotations"]["run.evergrad.dev/passing-by"]
        )

        # When it is created again, it is complete without a pod.
        manifest["spec"]["ttlSecondsAfterFinished"] = 3600
        again = runs.apply(manifest)
        again.wait_for_phase("Complete")
        assert again.condition("Complete")["reason"] == "AlreadyComplete"
        assert again.pods() == []
        runs.kubectl("delete", RESOURCE, "passing-by", "--wait=true")
    finally:
        operator.upgrade()
