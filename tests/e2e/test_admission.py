"""Errors in a file are reported immediately, by ``kubectl apply`` and by ``evergrad validate``.

Without the webhook, the status reports them before the first pod.
"""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import GROUP, RESOURCE, Run, Runs, make_manifest, wait_for
from patience import PATIENCE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "refused"
"""The twenty invalid files that unit tests read, too: there they are refused alike as files and as objects."""
HELD_BY_THE_CRD = {
    "max-below-min",
    "missing-sections",
    "nothing-is-kept",
    "numbers-out-of-bounds",
    "recipe-and-script",
    "three-mistakes",
    "two-horizons",
    "two-models",
    "units-that-do-not-fit",
    "unknown-optimizer",
    "volume-and-claim",
    "word-for-a-switch",
}
"""Files that an API server refuses without the webhook, by a type, a bound or a rule of the CRD. It stores
all others."""
UNREADABLE = {"wrong-types"}
"""Objects where the CRD has lists: the API server cannot decode them, so it never calls the webhook."""
BAD: dict[str, dict[str, Any]] = {
    "warmup-of-150-percent": {"training": {"schedule": {"warmup": "150%"}}},
    "warmup-beyond-the-end": {"training": {"schedule": {"warmup": 50}}},
    "three-mistakes": {
        "nodes": {"min": 3, "max": 2},
        "image": "Not an image",
        "training": {"schedule": {"warmup": "150%"}},
    },
    "word-for-a-switch": {"suspend": "yes"},
    "unknown-optimizer": {"training": {"optimizer": {"type": "adamz"}}},
    "nothing-is-kept": {"training": {"checkpoint": {"keep": 0}}},
    "four-bytes-of-memory": {"resources": {"limits": {"memory": "4"}}},
    "mount-of-no-volume": {
        "template": {"volumeMounts": [{"name": "nowhere", "mountPath": "/x"}]}
    },
    "variable-of-the-runs-own": {"template": {"env": [{"name": "RANK", "value": "0"}]}},
}
"""Mistakes that no golden file has, in the run of these tests, which is valid without them."""


def write(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    file = folder / f"{name}.yaml"
    file.write_text(json.dumps(make_manifest(name, steps=20, changes=changes), indent=1))
    return file


def bad_files(folder: Path) -> dict[str, Path]:
    """Return the file of each invalid run that an API server can read, by name."""
    golden = {file.stem.replace("_", "-"): file for file in sorted(GOLDEN.glob("*.yaml"))}
    assert len(golden) == 20 and golden.keys() >= UNREADABLE
    files = golden | {name: write(folder, name, changes) for name, changes in BAD.items()}
    return {name: file for name, file in files.items() if name not in UNREADABLE}


def validate(file: Path) -> list[str]:
    """Return the output of ``evergrad validate`` for each problem, without the line of the file."""
    done = subprocess.run(
        [sys.executable, "-m", "evergrad_cli", "validate", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 64, done
    found = [line.removeprefix("error: ") for line in done.stderr.splitlines()]
    return [re.sub(r" \(line \d+\)", "", line) for line in found]


def apply(operator: Any, runs: Runs, file: Path) -> subprocess.CompletedProcess[str]:
    cluster = operator.cluster
    command = [
        str(cluster.kubectl),
        "--kubeconfig",
        str(cluster.kubeconfig),
        "--namespace",
        runs.namespace,
    ]
    return subprocess.run(
        [*command, "apply", "-f", str(file)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def problems_in_message(name: str, output: str) -> list[str]:
    """Return the problems in kubectl's message for an invalid object."""
    head = f'The TrainingRun "{name}" is invalid: '
    assert output.startswith(head), output
    lines = output.removeprefix(head).strip().splitlines()
    return [line.removeprefix("* ") for line in lines]


def test_apply_prints_what_validate_prints(
    operator: Any, runs: Runs, tmp_path: Path
) -> None:
    wait_for(
        lambda: "denied" in apply_dry(operator, runs, tmp_path),
        "the webhook's first answer",
    )
    for name, file in bad_files(tmp_path).items():
        done, expected = apply(operator, runs, file), validate(file)
        assert done.returncode != 0, name
        assert problems_in_message(name, done.stderr) == expected, name
    for name in UNREADABLE:
        done = apply(operator, runs, GOLDEN / f"{name.replace('-', '_')}.yaml")
        assert done.returncode != 0 and "strict decoding error" in done.stderr, done
    assert runs.list("trainingruns") == []
    good = write(tmp_path, "good", {"nodes": {"min": 1, "max": 1}, "suspend": True})
    assert apply(operator, runs, good).returncode == 0


def apply_dry(operator: Any, runs: Runs, folder: Path) -> str:
    """Return kubectl's answer to a dry run of an invalid file, as one word."""
    file = write(folder, "first", {"nodes": {"min": 3, "max": 2}})
    done = runs.kubectl("apply", "--dry-run=server", "-f", str(file), check=False)
    return "denied" if "is invalid" in done else done


@pytest.mark.operator_ends
def test_without_the_webhook_problems_are_reported_before_the_first_pod_and_can_be_corrected(
    operator: Any, runs: Runs, tmp_path: Path
) -> None:
    stored: dict[str, list[str]] = {}
    with operator.gone():
        for name, file in bad_files(tmp_path).items():
            done = apply(operator, runs, file)
            if done.returncode == 0:
                stored[name] = validate(file)
            else:
                # The API server itself checks a type or bound, with its own message: nothing is stored.
                assert f'The TrainingRun "{name}" is invalid: ' in done.stderr, done.stderr
    assert set(stored) == bad_files(tmp_path).keys() - HELD_BY_THE_CRD
    for name, expected in stored.items():
        run = Run(runs, name)
        wait_for(
            lambda run=run: run.status().get("reason") == "InvalidSpec",
            f"{name}: InvalidSpec",
        )  # type: ignore[misc]
        assert run.status()["message"] == " ".join(expected)
        assert run.is_true("Stalled") and not run.is_true("Ready")
        assert run.pods() == []
        assert "recipeHash" not in run.status()
    corrected = write(tmp_path, "warmup-of-150-percent", {"nodes": {"min": 1, "max": 1}})
    done = apply(operator, runs, corrected)
    assert done.returncode == 0, done.stderr
    run = Run(runs, "warmup-of-150-percent")
    wait_for(run.pods, "the corrected run's pods")
    wait_for(
        lambda: run.status()["reason"] != "InvalidSpec",
        "a status that is not InvalidSpec any more",
    )


@pytest.mark.operator_ends
def test_a_run_that_was_stored_without_a_check_can_be_suspended_labelled_and_deleted(
    operator: Any, runs: Runs, tmp_path: Path
) -> None:
    name = "wrong-already"
    with operator.gone():
        done = apply(
            operator,
            runs,
            write(tmp_path, name, {"training": {"schedule": {"warmup": "150%"}}}),
        )
        assert done.returncode == 0, done.stderr
    wait_for(
        lambda: "denied" in apply_dry(operator, runs, tmp_path), "the webhook's answer"
    )
    target = f"{RESOURCE}/{name}"
    runs.kubectl("patch", target, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    runs.kubectl("label", target, "a=b")
    runs.kubectl(
        "patch",
        target,
        "--type=merge",
        "-p",
        '{"metadata":{"finalizers":["example.com/x"]}}',
    )
    runs.kubectl("delete", target, "--wait=false")
    runs.kubectl("patch", target, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
    wait_for(lambda: runs.list("trainingruns") == [], "the run's end")


@pytest.mark.long
def test_for_a_run_of_another_controller_no_object_is_created_and_nothing_is_written(
    runs: Runs,
) -> None:
    manifest = make_manifest("theirs", steps=20, changes={"managedBy": "example.com/other"})
    theirs = runs.apply(manifest)
    # The operator has observed it once it handles an object that was applied later.
    ours = runs.start("ours", steps=20, managedBy="evergrad.dev/operator")
    wait_for(ours.pods, "the pods of the operator's own run")
    runs.kubectl("label", f"{RESOURCE}/theirs", "a=b")
    ours.wait_for_phase("Complete")

    selector = f"{GROUP}/run=theirs"
    kinds = ("pods", "configmaps", "services", "secrets", "poddisruptionbudgets")
    assert {kind: runs.list(kind, selector) for kind in kinds} == {
        kind: [] for kind in kinds
    }
    assert runs.get("persistentvolumeclaims", "theirs") is None
    assert theirs.status() == {"observedGeneration": -1}
    assert not any(one["involvedObject"]["name"] == "theirs" for one in runs.list("events"))
