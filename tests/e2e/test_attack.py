"""A pod outside a run tries every port of the run, and gets nothing; the run trains to its end."""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import Run, Runs, wait_for
from patience import PATIENCE
from script_runs import finish, start_script, step_of

from evergrad_coordinator.edge.page_files import build_page

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]
JOIN_PORT, STATUS_PORT, METRICS_PORT = 29400, 29401, 29402
PAGE = build_page("run", needs_token=True).text.encode().decode("latin-1")
STRANGER = Path(__file__).with_name("stranger.py").read_text("utf-8")
LISTENING = """
import pathlib
lines = [line.split() for name in ("tcp", "tcp6") for line in pathlib.Path("/proc/net", name).read_text().splitlines()[1:]]
print(*sorted({int(words[1].rpartition(":")[2], 16) for words in lines if words[3] == "0A"}))
"""


@pytest.fixture
def elsewhere(runs: Runs) -> Iterator[str]:
    """A second namespace."""
    name = f"{runs.namespace}-else"
    runs.kubectl("create", "namespace", name)
    yield name
    runs.kubectl("delete", "namespace", name, "--wait=false")


def token_of(run: Run) -> str:
    """Return the token in the run's only Secret, read by name: the operator itself could not do this."""
    (secret,) = run.runs.list("secrets", f"evergrad.dev/run={run.name}")
    return base64.b64decode(secret["data"]["token"]).decode()


def find_targets(run: Run) -> list[tuple[str, int]]:
    """Return every port on which a pod of the run listens, and the coordinator by the name that its nodes
    use."""
    service = f"{run.name}-coordinator.{run.runs.namespace}.svc"
    found = [(service, JOIN_PORT), (service, STATUS_PORT)]
    for role in ("coordinator", "node"):
        for pod in run.live_pods(role=role).values():
            ports = run.runs.kubectl(
                "exec", pod["metadata"]["name"], "--", "python", "-c", LISTENING
            ).split()
            found += [(pod["status"]["podIP"], int(port)) for port in ports]
    assert {port for _, port in found} >= {JOIN_PORT, STATUS_PORT}
    return found


def attack(
    runs: Runs, namespace: str, labels: Mapping[str, str], targets: list[tuple[str, int]]
) -> list[dict[str, Any]]:
    """Return the response to a pod of this namespace with these labels."""
    for kind in ("configmap", "pod"):
        runs.kubectl(
            "--namespace",
            namespace,
            "delete",
            kind,
            "stranger",
            "--ignore-not-found",
            "--now",
        )
    runs.kubectl(
        "--namespace",
        namespace,
        "create",
        "configmap",
        "stranger",
        f"--from-literal=stranger.py={STRANGER}",
    )
    pod = build_pod(
        runs.cluster.product_images()[0], ["attacked", json.dumps(targets)], labels
    )
    runs.kubectl("--namespace", namespace, "apply", "-f", "-", text=json.dumps(pod))
    phase = ("get", "pod", "stranger", "-o", "jsonpath={.status.phase}")
    wait_for(
        lambda: runs.kubectl("--namespace", namespace, *phase) in ("Succeeded", "Failed"),
        "the end of the attack",
        seconds=PATIENCE,
    )
    log = runs.kubectl("--namespace", namespace, "logs", "stranger")
    assert runs.kubectl("--namespace", namespace, *phase) == "Succeeded", log
    return [json.loads(line) for line in log.splitlines()]


def build_pod(
    image: str, arguments: list[str], labels: Mapping[str, str]
) -> dict[str, Any]:
    """A pod of a user who may create pods, and knows the name of a run."""
    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }
    container = {
        "name": "stranger",
        "image": image,
        "command": ["python", "/script/stranger.py", *arguments],
        "securityContext": security,
        "volumeMounts": [{"name": "script", "mountPath": "/script"}],
    }
    user = {
        "runAsNonRoot": True,
        "runAsUser": 10001,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "stranger", "labels": dict(labels)},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": user,
            "containers": [container],
            "volumes": [{"name": "script", "configMap": {"name": "stranger"}}],
        },
    }


def find_leaks(tries: list[dict[str, Any]], secrets: list[str]) -> list[dict[str, Any]]:
    """Return the attempts with a response other than a refusal."""
    return [
        one
        for one in tries
        if one["port"] != METRICS_PORT
        and not is_closed_door(one["port"], one["answer"], secrets)
    ]


def is_closed_door(port: int, answer: str, secrets: list[str]) -> bool:
    if any(secret in answer for secret in secrets):
        return False
    if port == STATUS_PORT:
        # The page itself is the same for every run; only its events contain data of a run.
        is_page = answer.startswith("HTTP/1.1 200 ") and answer.endswith(f"\r\n\r\n{PAGE}")
        return not answer or is_page or bool(re.match(r"HTTP/1\.1 (400|401) ", answer))
    kinds = (
        [json.loads(line).get("type") for line in answer.splitlines()]
        if port == JOIN_PORT
        else []
    )
    return set(kinds) <= {"refused"} if port == JOIN_PORT else not answer


def stand(run: Run) -> dict[str, Any]:
    """Return everything that an attack could have changed."""
    status = run.status()
    pods = [*run.pods(), *run.pods(role="coordinator")]
    return {
        "pods": {
            pod["metadata"]["uid"]: [
                one["restartCount"] for one in pod["status"]["containerStatuses"]
            ]
            for pod in pods
        },
        "generation": status["progress"].get("generation"),
        "restarts": run.restarts(),
        "nodes": (status["nodes"]["min"], status["nodes"]["max"], status["nodes"]["ready"]),
    }


def test_other_pods_get_nothing_from_any_port_of_a_run_which_trains_to_its_end(
    runs: Runs, elsewhere: str
) -> None:
    run = start_script(runs, "attacked")
    wait_for(lambda: run.status()["nodes"].get("ready") == 2, "both nodes in the group")
    before, targets = stand(run), find_targets(run)
    addresses = [pod["status"]["podIP"] for pod in run.live_pods().values()]
    secrets = [token_of(run), run.get()["metadata"]["uid"], *addresses]

    # Even a pod with the run's label, for which the NetworkPolicy lets the run's own pods in.
    for namespace, labels in (
        (elsewhere, {}),
        (runs.namespace, {}),
        (runs.namespace, {"evergrad.dev/run": run.name}),
    ):
        tries = attack(runs, namespace, labels, targets)
        assert {(one["address"], one["port"]) for one in tries} == set(targets)
        assert find_leaks(tries, secrets) == []
    asked = [
        one
        for one in tries
        if one["port"] == STATUS_PORT and one["try"] in ("POST /bounds", "GET /live")
    ]
    assert {one["answer"].split(" ")[1] for one in asked if one["answer"]} == {"401"}, (
        "the status port was reached and is closed"
    )
    refused = [one for one in tries if one["port"] == JOIN_PORT and one["answer"]]
    assert refused, "the port for nodes was reached"

    # The run is not affected by the attempts.
    step = step_of(run)
    wait_for(lambda: step_of(run) > step, "steps after the attack")
    assert stand(run) == before
    status = finish(run)
    assert (run.restarts(), status["failures"]["withoutProgress"]) == ({}, 0)


def test_a_deleted_secret_is_restored_before_the_next_pod(runs: Runs, faults: Any) -> None:
    run = start_script(runs, "attacked")
    token = token_of(run)
    (secret,) = runs.list("secrets", f"evergrad.dev/run={run.name}")
    runs.kubectl("delete", "secret", secret["metadata"]["name"])
    faults.kill_container(runs.namespace, run.live_pods()[1]["metadata"]["name"])
    run.wait_for_attempt(1, 1)
    wait_for(lambda: run.status()["nodes"].get("ready") == 2, "both nodes in the group")
    assert token_of(run) == token
    finish(run)


def test_the_check_for_leaks_detects_leaks() -> None:
    for port, answer in (
        (JOIN_PORT, '{"type":"welcome"}\n'),
        (JOIN_PORT, '{"type":"refused","message":"the group has s3cret"}\n'),
        (STATUS_PORT, "HTTP/1.1 200 OK\r\n\r\n{}"),
        (STATUS_PORT, f"HTTP/1.1 200 OK\r\n\r\n{{}}{PAGE}"),
        (STATUS_PORT, "HTTP/1.1 401 Unauthorized\r\n\r\ns3cret"),
        (40000, "anything"),
    ):
        assert not is_closed_door(port, answer, ["s3cret"]), answer
    assert is_closed_door(JOIN_PORT, '{"type":"refused","message":"no"}\n', ["s3cret"])
    assert is_closed_door(STATUS_PORT, "HTTP/1.1 401 Unauthorized\r\n\r\n", ["s3cret"])
    assert is_closed_door(STATUS_PORT, f"HTTP/1.1 200 OK\r\n\r\n{PAGE}", ["s3cret"])
