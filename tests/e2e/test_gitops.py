"""A run in Git: repeated applies by two managers, at any time of its life, do not change it; an edit in Git
changes it while it trains."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster_runs import (
    ENDLESS,
    GROUP,
    RESOURCE,
    ROOT,
    Run,
    Runs,
    documents,
    make_manifest,
    wait_for,
)
from cluster_shell import Shell
from pages import read_commands

from bed import toolbox

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]
HEALTH = (
    "examples/gitops/argocd/resource_customizations/evergrad.dev/TrainingRun/health.lua"
)
SECOND = "argocd-controller"
"""The field manager of another tool that applies the same file."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
OWNED = ("generation", "labels", "annotations", "finalizers", "ownerReferences")


SECTION = {"resources": {"requests": {"cpu": "50m", "memory": "128Mi"}}}


class Git:
    """The file of one run, and the run in the cluster."""

    def __init__(self, runs: Runs, manifest: dict[str, Any]) -> None:
        self.runs, self.manifest = runs, manifest
        self.name: str = manifest["metadata"]["name"]

    def commit(self, spec: Mapping[str, Any]) -> None:
        """Edit the file, and apply it as Argo CD does without server-side apply."""
        self.manifest["spec"] |= spec
        self.sync()

    def sync(self) -> str:
        """Return the output of a client-side apply."""
        return self.runs.kubectl("apply", "-f", "-", text=json.dumps(self.manifest))

    def assert_in_sync(self, when: str) -> None:
        """Check that no way of comparing or applying the file shows or makes a change."""
        before = self._owned_by_git()
        for words in (
            ("diff",),
            ("diff", "--server-side", "--field-manager", SECOND),
        ):
            # kubectl reads the object and then sends a dry run: the operator may write the status in between.
            # A change that Git would make is shown each time.
            wait_for(lambda words=words: self._diff(*words) == "", f"{when}: no difference")
        # kubectl's server-side apply writes its copy of the file (LAST_APPLIED) in another format than the
        # client-side apply: the next client-side apply writes the annotation again, and reports "configured".
        self.sync()
        assert self.sync().strip() == f"trainingrun.{GROUP}/{self.name} unchanged", when
        words = ("apply", "--server-side", "--field-manager", SECOND, "-f", "-")
        self.runs.kubectl(*words, text=json.dumps(self.manifest))
        assert self._owned_by_git() == before, when

    def _diff(self, *words: str) -> str:
        # Its exit code is 1 if there are differences; kubectl() returns the output.
        return self.runs.kubectl(
            *words, "-f", "-", text=json.dumps(self.manifest), check=False
        )

    def _owned_by_git(self) -> dict[str, Any]:
        raw = Run(self.runs, self.name).get()
        metadata = {key: raw["metadata"].get(key) for key in OWNED}
        # kubectl's copy of the file belongs to kubectl.
        metadata["annotations"] = set(metadata["annotations"] or ()) - {LAST_APPLIED}
        return {"metadata": metadata, "spec": raw["spec"]}


def test_throughout_a_run_no_diff_and_no_apply_shows_or_makes_a_change(
    runs: Runs, faults: Any
) -> None:
    git = Git(runs, make_manifest("in-git", steps=ENDLESS))
    git.sync()
    run = runs.adopt("in-git")
    git.assert_in_sync("as soon as it is there")
    assert run.get()["metadata"]["generation"] == 1
    assert not run.get()["metadata"].get("finalizers")

    run.wait_for_phase("Running")
    git.assert_in_sync("while it trains")
    pods = run.wait_for_pods(0, 1)
    faults.kill_container(runs.namespace, pods[1]["metadata"]["name"])
    wait_for(run.restarts, "the loss in the status")
    git.assert_in_sync("after it has lost a pod")

    # Edits of a training run, each by a commit.
    git.commit({"suspend": True})
    run.wait_for_phase("Suspended")
    git.assert_in_sync("while it is suspended")
    git.commit({"suspend": False, "nodes": {"min": 1, "max": 1}})
    status = run.wait_for_phase("Running")
    step = status.get("checkpoint", {}).get("step", 0)
    git.assert_in_sync("once it goes on, on fewer nodes")
    wait_for(lambda: run.status()["nodes"]["max"] == 1, "the new bounds")

    wait_for(
        lambda: run.status()["progress"].get("step", 0) > step, "a step after the pause"
    )


def sample_until(git: Git, run: Run, *phases: str) -> set[str]:
    """Compare and apply the file repeatedly, at least once in one of ``phases``.

    Returns the phases during which whole samples were taken.
    """
    seen: set[str] = set()
    until = time.monotonic() + 900
    while not seen & set(phases):
        assert time.monotonic() < until, f"{phases}: not within 900 s; {run.status()}"
        before = run.status().get("phase", "Pending")
        git.assert_in_sync(f"phase {before}")
        if run.status().get("phase", "Pending") == before:
            seen.add(before)
    return seen


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("held", "changes"),
    [("Preparing", {"preparation": SECTION}), ("Starting", {})],
    ids=["preparing", "starting"],
)
def test_continuous_diffs_and_applies_show_no_change_from_start_to_end(
    runs: Runs, held: str, changes: dict[str, Any]
) -> None:
    """The pods wait for a ConfigMap, so that this phase is observed on slow and fast machines."""
    manifest = make_manifest("sampled", steps=60, changes=changes)
    later = {"name": "documents", "configMap": {"name": "later"}}
    manifest["spec"]["template"]["volumes"] = [later]
    git = Git(runs, manifest)
    git.sync()
    run = runs.adopt("sampled")
    # A ConfigMap that is missing for long is an obstacle, and the phase becomes Waiting.
    seen = sample_until(git, run, held, "Waiting")
    file = runs.scratch / "documents.jsonl"
    file.write_text(documents())
    runs.kubectl("create", "configmap", "later", f"--from-file=documents.jsonl={file}")
    seen |= sample_until(git, run, "Complete")
    assert seen & {held, "Waiting"} and "Complete" in seen, seen
    assert run.get()["metadata"]["generation"] == 1


@pytest.mark.long
def test_a_failed_run_shows_no_change_either(runs: Runs) -> None:
    sources = [{"name": "docs", "type": "jsonl", "path": "/documents/nowhere.jsonl"}]
    git = Git(
        runs,
        make_manifest(
            "failing", steps=60, changes={"training": {"data": {"sources": sources}}}
        ),
    )
    git.sync()
    run = runs.adopt("failing")
    assert "Failed" in sample_until(git, run, "Failed")
    assert run.get()["metadata"]["generation"] == 1


@pytest.mark.long
def test_a_finished_run_and_its_time_to_live_are_no_drift(runs: Runs) -> None:
    git = Git(runs, make_manifest("short", steps=60))
    git.sync()
    run = runs.adopt("short")
    run.wait_for_phase("Complete")
    git.assert_in_sync("once it is complete")
    git.commit({"ttlSecondsAfterFinished": 1})
    selector = f"{GROUP}/run=short"
    wait_for(
        lambda: (
            not any(
                runs.list(kind, selector) for kind in ("pods", "configmaps", "services")
            )
        ),
        "the end of what it was made of",
    )
    git.assert_in_sync("after its time to live")

    # A pruned run that returns from Git is complete, according to the record on its volume.
    runs.kubectl("delete", RESOURCE, "short", "--wait=true")
    wait_for(lambda: not runs.list("pods", selector), "the garbage collection")
    git.sync()
    run.wait_for_phase("Complete")
    assert run.condition("Complete")["reason"] == "AlreadyComplete"
    git.assert_in_sync("after it has come back")
    assert runs.list("pods", selector) == []


@pytest.mark.long
def test_an_edit_of_the_recipe_is_refused_with_its_field_and_changes_nothing(
    runs: Runs,
) -> None:
    git = Git(runs, make_manifest("fixed", steps=ENDLESS))
    git.sync()
    run = runs.adopt("fixed")
    run.wait_for_phase("Running")
    edited = json.loads(json.dumps(git.manifest))
    edited["spec"]["training"]["optimizer"]["learningRate"] = 0.5
    said = runs.kubectl("apply", "-f", "-", text=json.dumps(edited), check=False)
    assert "spec.training" in said and "new TrainingRun" in said
    git.assert_in_sync("after the refusal")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_argo_cd_engine_trains_wave_after_wave_and_prunes_runs_removed_from_git(
    runs: Runs, cluster: Any
) -> None:
    def make_file(name: str, *, wave: int) -> dict[str, Any]:
        manifest = make_manifest(name, steps=20)
        manifest["metadata"] |= {
            "namespace": runs.namespace,
            "labels": {"app.kubernetes.io/instance": "experiments"},
            "annotations": {"argocd.argoproj.io/sync-wave": str(wave)},
        }
        return manifest

    def sync(*files: dict[str, Any]) -> dict[str, str]:
        """Return the state of each object by name, according to Argo CD."""
        question = {
            "kubeconfig": str(cluster.kubeconfig),
            "namespace": runs.namespace,
            "application": "experiments",
            "health": (ROOT / HEALTH).read_text("utf-8"),
            "seconds": 900,
            "objects": files,
        }
        answers = toolbox.ask("argosync", question, timeout=1000)
        return {one["name"]: one["status"] for one in answers}

    first, second = (
        make_file(name, wave=wave) for wave, name in enumerate(("first", "second"))
    )
    for name in ("first", "second"):
        runs.adopt(name)
    assert sync(second, first) == {"first": "Synced", "second": "Synced"}
    ended = Run(runs, "first").status()["completionTime"]
    begun = Run(runs, "second").get()["metadata"]["creationTimestamp"]
    assert ended <= begun, "the second wave began before the first had ended"
    # The engine waits between waves, and not for the last one.
    Run(runs, "second").wait_for_phase("Complete")

    sync(first, second)
    for name in ("first", "second"):
        assert Run(runs, name).get()["metadata"]["generation"] == 1
    assert sync(first)["second"] == "Pruned"
    wait_for(lambda: runs.get("trainingruns", "second") is None, "the run's end")
    assert runs.get("persistentvolumeclaims", "second") is not None


def test_the_argo_cd_scripts_are_applied_in_addition_to_its_existing_config_map(
    cluster: Any, tmp_path: Path
) -> None:
    if not cluster.is_bed:
        pytest.skip(
            "makes and deletes the namespace argocd, which another cluster may have."
        )
    shell = Shell(cluster, tmp_path)
    [apply] = read_commands("docs/operate/gitops.md")
    shell.run("kubectl create namespace argocd")
    try:
        shell.run(
            "kubectl create configmap argocd-cm -n argocd --from-literal=url=https://cd"
        )
        assert "serverside-applied" in shell.run(apply)
        data = json.loads(shell.run("kubectl get configmap argocd-cm -n argocd -o json"))[
            "data"
        ]
    finally:
        shell.run("kubectl delete namespace argocd --wait=false")
    assert data["url"] == "https://cd"
    script = data["resource.customizations.health.evergrad.dev_TrainingRun"]
    assert script == (ROOT / HEALTH).read_text("utf-8")


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_experiments_of_the_example_complete_without_git_as_on_its_page(
    runs: Runs, tmp_path: Path
) -> None:
    shell = Shell(runs.cluster, tmp_path, namespace=runs.namespace)
    *applied, wait = read_commands("examples/gitops/README.md")
    for command in applied:
        shell.run(command)
    names = [one["metadata"]["name"] for one in runs.list("trainingruns")]
    for name in names:
        runs.adopt(name)
    assert len(names) == 7, names
    assert shell.run(wait, seconds=2000).count("condition met") == 7
