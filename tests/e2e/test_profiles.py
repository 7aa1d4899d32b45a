"""A namespace's profile on a real API server: read with the operator's own rights, kept by a run, and named
in errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from cluster_runs import ENDLESS, Runs, make_manifest, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(3600)]
DEVICE = "rdma/hca"
ENFORCE = "pod-security.kubernetes.io/enforce"
CAP_IPC_LOCK = 14
"""Number of the capability, by linux/capability.h."""


def put_profile(runs: Runs, text: str) -> None:
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "evergrad-profile"},
        "data": {"profile.yaml": text},
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(body))


@contextmanager
def profile(runs: Runs, text: str) -> Iterator[None]:
    put_profile(runs, text)
    try:
        yield
    finally:
        runs.kubectl("delete", "configmap", "evergrad-profile")


def test_a_run_keeps_its_namespace_profile_and_a_restart_takes_the_new_one(
    runs: Runs,
) -> None:
    with profile(runs, "defaults: {template: {labels: {cost-center: '1'}}}"):
        run = runs.start("profiled", steps=ENDLESS)
        run.wait_for_step(5)
        assert run.status()["profile"] == (
            f"default, ConfigMap {run.get()['metadata']['namespace']}/evergrad-profile"
        )
        first = run.live_pods()[0]
        assert first["metadata"]["labels"]["cost-center"] == "1"

        # A replaced pod has the values with which the run started, although the profile has changed.
        put_profile(runs, "defaults: {template: {labels: {cost-center: '2'}}}")
        runs.kubectl("delete", "pod", first["metadata"]["name"])
        run.wait_for_attempt(0, 1)
        assert run.live_pods()[0]["metadata"]["labels"]["cost-center"] == "1"

        run.patch({"restartNonce": "again"})
        wait_for(
            lambda: (
                {
                    pod["metadata"]["labels"].get("cost-center")
                    for pod in run.live_pods().values()
                }
                == {"2"}
            ),
            "pods with the new profile",
        )
        run.patch({"suspend": True})
        run.wait_for_phase("Suspended")


def test_an_invalid_profile_is_reported_and_the_run_starts_when_it_is_corrected(
    runs: Runs,
) -> None:
    with profile(runs, "defaults: {imge: x}"):
        run = runs.start("misprofiled", steps=20)
        run.wait_for_phase("Waiting")
        status = run.status()
        assert status["reason"] == "InvalidSpec"
        assert "evergrad-profile: defaults.imge: unknown key" in status["message"]
        assert run.pods() == []
        put_profile(runs, "defaults: {ttlSecondsAfterFinished: 86400}")
        run.wait_for_phase("Complete")


@pytest.mark.operator_ends
def test_an_rdma_device_comes_with_the_memlock_capability_if_a_profile_allows_it(
    runs: Runs, operator: Any, faults: Any
) -> None:
    faults.set_gpus("n1", 1, resource=DEVICE)
    # Only this level of Pod Security admits the capability.
    runs.kubectl(
        "label", "--overwrite", "namespace", runs.namespace, f"{ENFORCE}=privileged"
    )
    changes = {
        "nodes": {"min": 1, "max": 1},
        "resources": {"requests": {DEVICE: "1"}, "limits": {DEVICE: "1"}},
    }
    # The webhook and the operator use one check: the device is refused when the file is applied.
    probe = {"name": "probe", "command": ["true"], "resources": changes["resources"]}
    beside = {"nodes": changes["nodes"], "template": {"initContainers": [probe]}}
    for asked in (changes, beside):
        manifest = make_manifest("without", steps=20, changes=asked)
        said = runs.kubectl("apply", "-f", "-", text=json.dumps(manifest), check=False)
        assert "is not allowed by the profile of the run" in said, said

    operator.upgrade(settings=[f"runs.profiles.fabric.allows.rdma={{{DEVICE}}}"])
    try:
        run = runs.start("with", steps=ENDLESS, profile="fabric", **changes)
        run.wait_for_step(5)
        pod = run.live_pods()[0]
        (trainer,) = [one for one in pod["spec"]["containers"] if one["name"] == "trainer"]
        assert trainer["securityContext"]["capabilities"] == {
            "drop": ["ALL"],
            "add": ["IPC_LOCK"],
        }
        assert pod["spec"]["nodeName"] == "n1"
        # The kernel's name for it: a program may use it, and it is the only one.
        said = runs.kubectl(
            "exec", pod["metadata"]["name"], "-c", "trainer", "--", "cat", "/proc/1/status"
        )
        bounding = next(line for line in said.splitlines() if line.startswith("CapBnd:"))
        assert int(bounding.split()[1], 16) == 1 << CAP_IPC_LOCK
        (coordinator,) = run.live_pods(role="coordinator").values()
        for container in coordinator["spec"]["containers"]:
            assert "add" not in container["securityContext"]["capabilities"]
    finally:
        operator.upgrade()
