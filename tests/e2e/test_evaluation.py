"""A separate pod evaluates each checkpoint of a run, during the training and afterwards, with the same bits
as `evergrad evaluate`."""

import json
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import Run, Runs, wait_for
from patience import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]
SECTION = {"resources": {"requests": {"cpu": "50m", "memory": "256Mi"}}}


def training(*, every: int, keep: int) -> dict[str, Any]:
    return {
        "checkpoint": {"every": {"steps": every}, "keep": keep},
        "data": {"heldOut": {"count": 12}},
        # As many threads as the commands below, because the last bits depend on their number.
        "runtime": {"threads": 1},
    }


def results_of(directory: Path) -> dict[int, dict[str, float]]:
    """Return step → set → loss, as in `evaluations/`; each was written once."""
    found: dict[int, dict[str, float]] = {}
    for path in sorted((directory / "evaluations").glob("*.json")):
        row = json.loads(path.read_text())
        assert row["name"] not in found.setdefault(row["step"], {}), path
        found[row["step"]][row["name"]] = row["loss"]
    return found


def shown(run: Run) -> dict[str, float]:
    """Return set → loss, as in the status."""
    results = run.status()["evaluation"]["results"]
    return {one["name"]: float(one["values"]["loss"]) for one in results}


def wait_until_evaluated(
    run: Run, count: int, *, seconds: float = 2 * PATIENCE
) -> dict[str, Any]:
    """Return the part of the status, once this number of checkpoints is evaluated and none waits."""

    def is_done() -> Any:
        found = run.status().get("evaluation", {})
        is_over = (found.get("state"), found.get("waiting")) == ("UpToDate", 0)
        return found if is_over and found.get("evaluated") == count else None

    found: dict[str, Any] = wait_for(
        is_done, f"{count} evaluated checkpoints", seconds=seconds
    )
    return found


@pytest.mark.capability("C-2")
def test_each_checkpoint_is_evaluated_once_with_the_bits_of_the_command_while_one_is_kept(
    runs: Runs,
) -> None:
    run = runs.start(
        "evaluated", steps=30, evaluation=SECTION, training=training(every=10, keep=1)
    )
    run.wait_for_phase("Complete", seconds=900)
    found = wait_until_evaluated(run, 3)
    assert found["step"] == 30 and "passedOver" not in found
    directory = runs.volume("evaluated") / "evaluated"
    results = results_of(directory)
    assert sorted(results) == [10, 20, 30]
    assert shown(run) == results[30]
    # The run itself has evaluated nothing between its steps.
    own = directory / "evaluation.jsonl"
    assert not own.exists() or not own.read_text()
    assert run.restarts() == {}

    # The command finds the pods' files and measures the same bits again.
    said = json.loads(_measure_anew(runs, run, step=30))
    losses = {row["name"]: row["loss"] for row in said["results"]}
    assert [row["is_new"] for row in said["results"]] == [True] * len(losses)
    assert losses == results[30]


@pytest.mark.long
def test_a_killed_evaluation_pod_is_replaced_and_the_result_is_the_same(runs: Runs) -> None:
    # No host has this label: the first pod exists for as long as the test needs it.
    nowhere = {**SECTION, "nodeSelector": {"evergrad.dev/nowhere": "yes"}}
    run = runs.start(
        "evaluated-again", steps=10, evaluation=nowhere, training=training(every=10, keep=1)
    )

    def find(attempt: int, *phases: str) -> Any:
        name = f"evaluated-again-evaluate-10-{attempt}"
        found = runs.get("pods", name)
        return name if found and found["status"].get("phase") in phases else None

    def kill(name: str) -> None:
        runs.kubectl("delete", "pod", name, "--grace-period=0", "--force")

    first = wait_for(lambda: find(0, "Pending"), "the pod that evaluates", seconds=PATIENCE)
    run.wait_for_phase("Complete")
    assert run.status()["evaluation"]["state"] == "Waiting"
    run.patch({"evaluation": {"nodeSelector": None}})
    kill(first)

    # In the middle, or at its end on a fast machine: partial results are kept, and found again.
    second = wait_for(
        lambda: find(1, "Running", "Succeeded"), "its successor", seconds=PATIENCE
    )
    kill(second)
    found = wait_until_evaluated(run, 1)
    assert found["step"] == 10
    directory = runs.volume("evaluated-again") / "evaluated-again"
    results = results_of(directory)
    assert shown(run) == results[10]
    assert run.restarts() == {}


def _measure_anew(runs: Runs, run: Run, *, step: int) -> str:
    """Return the output of `evergrad evaluate` in a pod of the same image, after the pods' results were moved
    away."""
    (pod, *_) = run.pods(role="evaluation")
    spec = pod["spec"]
    container = spec["containers"][0]
    folder = f"/volume/{run.name}"
    script = (
        f"mv {folder}/evaluations {folder}/evaluations.before && "
        f"evergrad evaluate {folder} --checkpoint {step} --json 2>/dev/null; "
        f"rm -rf {folder}/evaluations && mv {folder}/evaluations.before {folder}/evaluations"
    )
    name = f"{run.name}-anew"
    volumes = [one for one in spec["volumes"] if "kube-api" not in one["name"]]
    mounts = [one for one in container["volumeMounts"] if "kube-api" not in one["name"]]
    kept = ("image", "imagePullPolicy", "env", "securityContext", "resources")
    body = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": spec["securityContext"],
            "volumes": volumes,
            "containers": [
                {
                    "name": "trainer",
                    "command": ["sh", "-c", script],
                    "volumeMounts": mounts,
                    **{key: container[key] for key in kept if key in container},
                }
            ],
        },
    }
    runs.kubectl("apply", "-f", "-", text=json.dumps(body))

    def has_ended() -> bool:
        phase = (runs.get("pods", name) or {}).get("status", {}).get("phase")
        return phase in ("Succeeded", "Failed")

    try:
        wait_for(has_ended, "the end of the command", seconds=PATIENCE)
        return runs.kubectl("logs", name)
    finally:
        runs.kubectl("delete", "pod", name, "--wait=false", check=False)
