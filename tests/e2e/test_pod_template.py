"""Additions of a template to a run's pods, on a real kubelet: an account that the installation allows, its
token, variables from whole objects, and init containers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster_runs import CONTAINER, ENDLESS, RESTRICTED, Runs, wait_for
from patience import PATIENCE

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(3600)]
FETCH = """
set -eu
test "$GREETING" = hello
test "$(wc -c </identity/token)" -gt 100
cp /documents/documents.jsonl /data/documents.jsonl
"""
DOCUMENTS = {"name": "documents", "mountPath": "/documents"}
TEMPLATE: dict[str, Any] = {
    "serviceAccountName": "fetcher",
    "envFrom": [{"configMapRef": {"name": "settings"}}],
    "volumes": [
        {"name": "documents", "configMap": {"name": "documents"}},
        {"name": "data", "emptyDir": {}},
        {
            "name": "identity",
            "projected": {
                "sources": [
                    {
                        "serviceAccountToken": {
                            "path": "token",
                            "audience": "sts.example.com",
                        }
                    }
                ]
            },
        },
    ],
    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    "initContainers": [
        {
            "name": "fetch",
            "command": ["sh", "-c", FETCH],
            "envFrom": [{"configMapRef": {"name": "settings"}}],
            "volumeMounts": [
                DOCUMENTS,
                {"name": "data", "mountPath": "/data"},
                {"name": "identity", "mountPath": "/identity", "readOnly": True},
            ],
        }
    ],
}
DATA = {"data": {"sources": [{"name": "docs", "path": "/data/documents.jsonl"}]}}


@pytest.fixture
def allowed(operator: Any) -> Iterator[None]:
    """The installation allows the service account ``fetcher``."""
    operator.upgrade(settings=["runs.allowed.serviceAccountNames={fetcher}"])
    yield
    operator.upgrade()


def make_objects(runs: Runs) -> None:
    runs.kubectl("create", "serviceaccount", "fetcher")
    literals = ("GREETING=hello", "HOME=/nowhere", "EVERGRAD_POD_IP=192.0.2.1")
    runs.kubectl(
        "create", "configmap", "settings", *(f"--from-literal={one}" for one in literals)
    )


@pytest.mark.operator_ends
def test_an_init_container_fetches_data_with_the_token_of_an_allowed_service_account(
    runs: Runs, allowed: None
) -> None:
    make_objects(runs)
    run = runs.start("fetched", steps=ENDLESS, template=TEMPLATE, training=DATA)
    run.wait_for_step(1)
    for pod in run.pods():
        spec, name = pod["spec"], pod["metadata"]["name"]
        assert spec["serviceAccountName"] == "fetcher"
        assert not any("kube-api-access" in one["name"] for one in spec["volumes"])
        said = runs.kubectl("exec", name, "-c", "trainer", "--", "env")
        variables = dict(line.partition("=")[::2] for line in said.splitlines())
        assert variables["GREETING"] == "hello"
        # Keys of the ConfigMap that Evergrad sets itself have no effect.
        assert variables["HOME"] == "/tmp"
        assert variables["EVERGRAD_POD_IP"] == pod["status"]["podIP"]
    (coordinator,) = run.pods(role="coordinator")
    assert coordinator["spec"]["serviceAccountName"] == "default"


def test_a_service_account_that_is_not_allowed_is_refused_by_apply(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="it allows none"):
        runs.start("refused", steps=ENDLESS, template=TEMPLATE, training=DATA)
    assert runs.list("trainingruns") == []


def test_an_init_container_that_fails_is_reported_with_its_last_output(runs: Runs) -> None:
    template = {
        "initContainers": [
            {"name": "fetch", "command": ["sh", "-c", "echo no such bucket; exit 3"]}
        ]
    }
    changes = {
        "nodes": {"min": 1, "max": 1},
        "failurePolicy": {"maxFailuresWithoutProgress": 1},
    }
    run = runs.start("unfetched", steps=ENDLESS, template=template, **changes)
    run.wait_for_phase("Failed")
    condition = run.condition("Failed")
    assert condition["reason"] == "WorkerCrash"
    assert "exit code 3: init container fetch: no such bucket" in condition["message"]


def test_a_pod_that_exceeds_its_disk_limit_is_evicted_and_the_run_names_the_remedy(
    runs: Runs,
) -> None:
    fill = "head -c 200M /dev/zero >/tmp/large; sleep 1000"
    template = {"initContainers": [{"name": "fill", "command": ["sh", "-c", fill]}]}
    run = runs.start(
        "filled",
        steps=ENDLESS,
        nodes={"min": 1, "max": 1},
        failurePolicy={"maxFailuresWithoutProgress": 1},
        resources={"limits": {"ephemeral-storage": "50Mi"}},
        template=template,
    )
    wait_for(
        lambda: run.status().get("phase") == "Failed",
        "filled: the run fails",
        seconds=PATIENCE,
    )
    condition = run.condition("Failed")
    assert condition["reason"] == "OutOfEphemeralStorage"
    assert "spec.resources.limits.ephemeral-storage" in condition["message"]


SCRIPT = """
import os, pathlib, time
names = ("HUB_TOKEN", "GREETING", "POD_NAME", "FIXED")
pathlib.Path("given").write_text(" ".join(os.environ.get(name, "-") for name in names))
while not pathlib.Path("end").exists():
    time.sleep(0.2)
"""


def test_a_script_can_use_values_of_other_objects_and_a_volume_for_its_pod_alone(
    runs: Runs,
) -> None:
    runs.kubectl("create", "configmap", "script", f"--from-literal=train.py={SCRIPT}")
    runs.kubectl("create", "configmap", "settings", "--from-literal=GREETING=hello")
    runs.kubectl("create", "secret", "generic", "hub", "--from-literal=token=first")
    values = {
        "HUB_TOKEN": {"secretKeyRef": {"name": "hub", "key": "token"}},
        "GREETING": {"configMapKeyRef": {"name": "settings", "key": "GREETING"}},
        "POD_NAME": {"fieldRef": {"fieldPath": "metadata.name"}},
    }
    run = runs.start(
        "alone",
        steps=1,
        nodes={"min": 1, "max": 1},
        training=None,
        script={
            "command": ["/script/train.py"],
            "env": {"FIXED": "as-written"},
            "valueFrom": values,
        },
        storage={"accessModes": ["ReadWriteOncePod"]},
        template={
            "volumes": [{"name": "script", "configMap": {"name": "script"}}],
            "volumeMounts": [{"name": "script", "mountPath": "/script"}],
        },
    )

    def given() -> str:
        path = run.directory() / "given"
        return path.read_text() if path.exists() else ""

    run.wait_for_pods(0)
    wait_for(given, "what the script was given", seconds=PATIENCE)
    assert given() == "first hello alone-0-0 as-written"
    claim = runs.get("persistentvolumeclaims", "alone") or {}
    assert claim["spec"]["accessModes"] == ["ReadWriteOncePod"]
    # A second pod that mounts it next to the run's pod is not scheduled.
    reader = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "beside"},
        "spec": {
            **RESTRICTED,
            "containers": [
                {
                    "name": "beside",
                    "image": run.live_pods()[0]["spec"]["containers"][0]["image"],
                    "command": ["sleep", "1000"],
                    "securityContext": CONTAINER,
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                }
            ],
            "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": "alone"}}],
        },
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(reader))

    def is_not_scheduled() -> bool:
        pod = runs.get("pods", "beside") or {}
        conditions = pod.get("status", {}).get("conditions", [])
        return any(
            (one["type"], one.get("reason")) == ("PodScheduled", "Unschedulable")
            for one in conditions
        )

    wait_for(is_not_scheduled, "the scheduler's refusal of a second pod")
    runs.kubectl("delete", "pod", "beside", "--now")

    # Values may change without a new run: the next pod has the new values.
    runs.kubectl("patch", "secret", "hub", "-p", '{"stringData":{"token":"second"}}')
    run.patch({"restartNonce": "again"})
    wait_for(
        lambda: given().startswith("second hello alone-0-"),
        "the new value",
        seconds=PATIENCE,
    )
    assert given().split()[2] != "alone-0-0"
    (run.directory() / "end").touch()
    run.wait_for_phase("Complete")
