"""Each kind of failure has its condition, its reason and a message with a remedy; and retries are limited."""

import json
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import RESOURCE, Run, Runs, wait_for
from cluster_shell import Shell
from pages import read_commands

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]


def expect_failed(run: Run, reason: str, *words: str) -> None:
    """Check that the run has failed with this reason, that the message contains each of ``words``, and that
    nothing still trains."""
    run.wait_for_phase("Failed")
    run.runs.kubectl(
        "wait", "--for=condition=Failed", f"{RESOURCE}/{run.name}", "--timeout=600s"
    )
    condition = run.condition("Failed")
    assert (condition["status"], condition["reason"]) == ("True", reason), condition
    assert run.is_true("Stalled") and not run.is_true("Ready")
    for word in words:
        assert word in condition["message"], condition["message"]
    wait_for(
        lambda: not run.live_pods() and not run.live_pods(role="coordinator"),
        "the pods' end",
    )


def expect_waiting(run: Run, reason: str, *words: str) -> None:
    """Check that the run waits, reports why, and creates no more pods meanwhile."""

    def is_reported() -> Any:
        text = json.dumps(run.status().get("conditions", []))
        return reason in text and all(word in text for word in words)

    wait_for(is_reported, f"{run.name}: {reason}")
    assert run.status()["phase"] not in ("Failed", "Complete")
    pods = len(run.pods())
    time.sleep(5)
    assert len(run.pods()) <= max(pods, 2)


@pytest.fixture
def shell(runs: Runs, tmp_path: Path) -> Shell:
    """Run a command without a default namespace: pages of alerts name the namespace in each command."""
    return Shell(runs.cluster, tmp_path)


def play_runbook(shell: Shell, page: str, run: Run) -> str:
    """Run the commands of an alert's page, each of which must name this run, and return their output."""
    shown = []
    for command in read_commands(page):
        command = command.replace("NAMESPACE", run.runs.namespace)
        shown.append(shell.run(re.sub(r"\bRUN\b", run.name, command)))
        assert run.name in shown[-1], command
    return "\n".join(shown)


def count_pods_ever(runs: Runs, run: Run) -> int:
    """Return the number of pods of the run that were ever created, according to their events."""
    events = runs.list("events")
    names = {
        event["involvedObject"]["name"]
        for event in events
        if event["involvedObject"]["kind"] == "Pod"
    }
    return len({name for name in names if name.startswith(f"{run.name}-")})


def test_12_a_wrong_data_path_fails_at_once_and_names_the_field(
    runs: Runs, shell: Shell
) -> None:
    sources = [{"name": "docs", "type": "jsonl", "path": "/documents/nowhere.jsonl"}]
    run = runs.start("wrong-path", steps=20, training={"data": {"sources": sources}})
    expect_failed(run, "UserError", "/documents/nowhere.jsonl")
    assert len(run.pods()) <= 2, "a wrong configuration was tried again"
    shown = play_runbook(shell, "docs/runbooks/TrainingRunFailed.md", run)
    assert "/documents/nowhere.jsonl" in shown


def test_12_a_wrong_shape_fails_at_once_and_reports_what_fits(runs: Runs) -> None:
    run = runs.start(
        "wrong-shape", steps=20, training={"model": {"config": {"num_attention_heads": 3}}}
    )
    expect_failed(
        run,
        "UserError",
        "spec.training.model.config",
        "not a multiple of the number of attention heads (3)",
    )
    assert len(run.pods()) <= 2


def test_12_out_of_memory_ends_after_its_budget_with_that_reason(
    runs: Runs, shell: Shell
) -> None:
    run = runs.start(
        "small-memory",
        steps=20,
        nodes={"min": 1, "max": 1},
        resources={"requests": {"memory": "64Mi"}, "limits": {"memory": "150Mi"}},
        failurePolicy={"maxFailuresWithoutProgress": 1},
    )
    expect_failed(run, "OutOfMemory", "150Mi", "memory")
    assert count_pods_ever(runs, run) <= 5
    shown = play_runbook(shell, "docs/runbooks/TrainingRunRestartStorm.md", run)
    assert "OutOfMemory" in shown


def test_12_a_missing_image_is_waited_for_with_a_reason(runs: Runs) -> None:
    run = runs.start("no-image", steps=20, image="localhost/no-such-image:v1")
    expect_waiting(run, "ImagePullFailed", "localhost/no-such-image:v1")


def test_12_an_exhausted_quota_is_waited_for_and_the_run_trains_when_quota_is_available(
    runs: Runs,
) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {"pods": "0"}},
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(quota))
    wait_for(
        lambda: "hard" in (runs.get("resourcequotas", "small") or {}).get("status", {}),
        "the quota",
    )
    run = runs.start("poor", steps=20)
    expect_waiting(run, "QuotaExceeded", "small")
    runs.kubectl("delete", "resourcequota", "small")
    run.wait_for_phase("Complete")


def test_12_unschedulable_pods_are_waited_for_with_the_message_of_the_scheduler(
    runs: Runs, shell: Shell
) -> None:
    run = runs.start(
        "unschedulable", steps=20, template={"nodeSelector": {"no-such": "label"}}
    )
    expect_waiting(run, "Unschedulable", "node affinity/selector")
    shown = play_runbook(shell, "docs/runbooks/TrainingRunNotStarting.md", run)
    assert "node affinity/selector" in shown


def test_12_a_missing_volume_is_waited_for_by_name(runs: Runs, shell: Shell) -> None:
    run = runs.start(
        "no-volume", steps=20, storage={"size": None, "claimName": "no-such-claim"}
    )
    expect_waiting(run, "VolumeMissing", "no-such-claim")
    shown = play_runbook(shell, "docs/runbooks/TrainingRunBlocked.md", run)
    assert "no-such-claim" in shown


@pytest.mark.long
def test_12_a_full_volume_fails_with_the_size_in_the_message(runs: Runs) -> None:
    run = runs.start(
        "full",
        steps=400,
        nodes={"min": 1, "max": 1},
        storage={"size": "16Mi"},
        training={
            "model": {"config": {"hidden_size": 256, "intermediate_size": 1024}},
            "checkpoint": {"every": {"steps": 5}, "keep": 50},
        },
        failurePolicy={"maxFailuresWithoutProgress": 1},
    )
    expect_failed(run, "VolumeFull", "/volume/full", "free", "one checkpoint takes")


FILL = """
import errno
block = bytes(2**16)
with open("/volume/filler", "ab", buffering=0) as filler:
    while block:
        try:
            filler.write(block)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            block = block[: len(block) // 2]
"""
"""Write until the volume is full, as the user of the pod."""


def call_in_pod(run: Run, *command: str) -> str:
    """Return the output of a command in the pod of node 0: a small claim is visible only there."""
    pod = run.live_pods()[0]["metadata"]["name"]
    return run.runs.kubectl("exec", pod, "-c", "trainer", "--", *command)


@pytest.mark.long
def test_12_a_volume_that_fills_up_is_an_unhealthy_checkpoint_until_space_is_free(
    runs: Runs,
) -> None:
    if not runs.cluster.is_bed:
        pytest.skip("only on the bed is a claim a file system of its size")
    checkpoint = {"every": {"steps": 5}, "keep": 4, "maxFailures": 100_000}
    run = runs.start(
        "fills-up",
        steps=1_000_000,
        nodes={"min": 1, "max": 1},
        storage={"size": "48Mi"},
        training={"checkpoint": checkpoint},
    )
    healthy = "CheckpointHealthy"
    wait_for(lambda: saved_step(run) >= 20, "checkpoints of the run")
    wait_for(lambda: run.is_true(healthy), "a healthy checkpoint")

    # There is room for the kept checkpoints, but not for one more: a newer checkpoint is saved nevertheless.
    call_in_pod(run, "python", "-c", FILL)
    before = saved_step(run)
    wait_for(lambda: saved_step(run) > before, "a checkpoint on the full volume")

    # The freed space is filled, too: in the end only the newest checkpoint is left.
    def has_failed() -> bool:
        call_in_pod(run, "python", "-c", FILL)
        return run.condition(healthy).get("status") == "False"

    wait_for(has_failed, "an unhealthy checkpoint")
    condition, status = run.condition(healthy), run.status()
    assert condition["reason"] == "VolumeFull" and status["phase"] == "Running", status
    assert "The newest valid checkpoint is of step " in condition["message"]
    assert f"Enlarge the PersistentVolumeClaim {run.claim()}" in condition["message"]
    kept = call_in_pod(run, "ls", f"/volume/{run.name}/checkpoints")
    assert "step-" in kept, "the newest checkpoint was deleted"
    assert "HostFault" not in json.dumps(status)

    call_in_pod(run, "rm", "/volume/filler")
    wait_for(lambda: run.is_true(healthy), "a healthy checkpoint after there is room")
    # On a busy machine a node of the cluster may be lost in the meantime: that is another cause.
    assert "VolumeFull" not in run.restarts()


def saved_step(run: Run) -> int:
    """Return the step of the newest checkpoint, as in the status."""
    return int(run.status().get("checkpoint", {}).get("step") or 0)


def test_12_leftovers_of_a_run_deleted_without_its_children_are_removed_by_one_command(
    runs: Runs,
) -> None:
    run = runs.start("left", steps=1_000_000)
    run.wait_for_step(5)
    left = [
        pod["metadata"]["name"]
        for role in ("node", "coordinator")
        for pod in run.pods(role=role)
    ]
    runs.kubectl("delete", RESOURCE, run.name, "--cascade=orphan")
    said = [event["message"] for event in runs.list("events")]
    assert not [text for text in said if " ended" in text], "the pods still run"

    run = runs.start("left", steps=1_000_000)
    expect_waiting(run, "NameTaken", *(f"Pod {name}" for name in left))
    found = re.search(r"Remove all of them with: (kubectl .+?) \(", run.status()["message"])
    assert found is not None, run.status()["message"]
    runs.kubectl(*shlex.split(found[1])[1:])
    run.wait_for_phase("Running", seconds=600)


def test_12_a_limit_range_that_refuses_the_coordinator_names_what_can_be_changed(
    runs: Runs,
) -> None:
    limit_range = {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "tight"},
        "spec": {"limits": [{"type": "Container", "max": {"memory": "200Mi"}}]},
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(limit_range))
    run = runs.start("tight", steps=20)
    expect_waiting(run, "AdmissionRefused", "Change the LimitRange", "runs.coordinator")


def test_12_a_script_that_raises_in_one_rank_is_reported_with_the_rank_and_its_last_output(
    runs: Runs,
) -> None:
    text = (
        "import os, sys\nif os.environ['RANK'] == '1':\n    raise ValueError('the eighth "
        "sin')\nimport time\ntime.sleep(600)\n"
    )
    runs.kubectl("create", "configmap", "script", f"--from-literal=bad.py={text}")
    run = runs.start(
        "raises",
        steps=1,
        training=None,
        script={"command": ["/script/bad.py"], "gracePeriodSeconds": 2},
        template={
            "volumes": [{"name": "script", "configMap": {"name": "script"}}],
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        },
        failurePolicy={"maxFailuresWithoutProgress": 1},
    )
    expect_failed(run, "UserError", "ValueError: the eighth sin", "rank 1")


def test_secrets_appear_only_as_references(runs: Runs, operator: Any) -> None:
    secret = "canary-s3cr3t"
    runs.kubectl("create", "secret", "generic", "token", f"--from-literal=token={secret}")
    env = [
        {"name": "OMP_NUM_THREADS", "value": "1"},
        {
            "name": "HF_TOKEN",
            "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}},
        },
    ]
    run = runs.start("discreet", steps=20, template={"env": env})
    run.wait_for_phase("Complete")
    places: dict[str, Callable[[], str]] = {
        "status and spec": lambda: json.dumps(run.get()),
        "events": lambda: json.dumps(runs.list("events")),
        "config maps": lambda: json.dumps(runs.list("configmaps")),
        "the operator's log": operator.logs,
        "the operator's metrics": operator.metrics,
        "the pods' logs": lambda: runs.kubectl(
            "logs", "-l", "evergrad.dev/run=discreet", "--tail=-1", "--prefix"
        ),
        "the run directory": lambda: "".join(
            path.read_text("utf-8", "replace") for path in run.directory().rglob("*.json*")
        ),
    }
    for place, read in places.items():
        assert secret not in read(), place
