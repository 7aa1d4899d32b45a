"""What a template adds to the pods of a run, on a real kubelet: an account that the installation allows, a
token of it, variables of whole objects, and init containers."""

from collections.abc import Iterator
from typing import Any

import pytest
from cluster_runs import ENDLESS, Runs, wait_for

pytestmark = [pytest.mark.long, pytest.mark.e2e, pytest.mark.timeout(1200)]
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
                    {"serviceAccountToken": {"path": "token", "audience": "sts.example.com"}}
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
    """The installation allows the account ``fetcher``."""
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
def test_data_are_fetched_by_an_init_container_with_an_allowed_accounts_token(
    runs: Runs, allowed: None
) -> None:
    make_objects(runs)
    run = runs.start("fetched", steps=ENDLESS, template=TEMPLATE, training=DATA)
    run.wait_for_step(1, seconds=600)
    for pod in run.pods():
        spec, name = pod["spec"], pod["metadata"]["name"]
        assert spec["serviceAccountName"] == "fetcher"
        assert not any("kube-api-access" in one["name"] for one in spec["volumes"])
        said = runs.kubectl("exec", name, "-c", "trainer", "--", "env")
        variables = dict(line.partition("=")[::2] for line in said.splitlines())
        assert variables["GREETING"] == "hello"
        # Keys of the ConfigMap that Evergrad sets itself are of no effect.
        assert variables["HOME"] == "/tmp"
        assert variables["EVERGRAD_POD_IP"] == pod["status"]["podIP"]
    (coordinator,) = run.pods(role="coordinator")
    assert coordinator["spec"]["serviceAccountName"] == "default"


def test_an_account_that_is_not_allowed_is_refused_as_it_is_applied(runs: Runs) -> None:
    with pytest.raises(AssertionError, match="it allows none"):
        runs.start("refused", steps=ENDLESS, template=TEMPLATE, training=DATA)
    assert runs.list("trainingruns") == []


def test_an_init_container_that_fails_is_named_with_its_last_words(runs: Runs) -> None:
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
    run.wait_for_phase("Failed", seconds=600)
    condition = run.condition("Failed")
    assert condition["reason"] == "WorkerCrash"
    assert "exit code 3: init container fetch: no such bucket" in condition["message"]


def test_a_pod_that_writes_more_than_its_limit_is_evicted_and_the_run_says_what_to_do(
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
        lambda: run.status().get("phase") == "Failed", "filled: the run fails", seconds=600
    )
    condition = run.condition("Failed")
    assert condition["reason"] == "OutOfEphemeralStorage"
    assert "spec.resources.limits.ephemeral-storage" in condition["message"]
