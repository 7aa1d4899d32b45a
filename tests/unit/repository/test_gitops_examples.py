"""The examples for Argo CD and Flux: rendered as those render them, and checked as an API server would."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bed import chart, schemas, toolbox
from bed.shell import run
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.validation import check_run

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/gitops"
# The modules of their controllers are not available, so only this repository's own values are checked.
UNKNOWN = {"GitRepository", "HelmRelease"}


@pytest.fixture(scope="module")
def kubectl() -> Path:
    if toolbox.missing(("kubernetes",)):
        pytest.skip("kubectl is not built. make cluster builds it, with Go.")
    return toolbox.binary("kubectl")


def objects_of(folder: str) -> list[dict[str, Any]]:
    return [
        one
        for path in sorted((EXAMPLES / folder).glob("*.yaml"))
        for one in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def find(folder: str, kind: str, name: str) -> dict[str, Any]:
    [found] = [
        one
        for one in objects_of(folder)
        if one["kind"] == kind and one["metadata"]["name"] == name
    ]
    return found


def problems_of(objects: list[dict[str, Any]]) -> list[str]:
    """Return the findings of ``evergrad validate``, except for paths in pods."""
    assert objects and all(one["kind"] == "TrainingRun" for one in objects)
    return [str(problem) for one in objects for problem in check_run(one)[1]]


def test_each_file_of_the_folder_is_a_separate_experiment() -> None:
    paths = sorted((EXAMPLES / "runs").glob("*"))
    assert [path.suffix for path in paths] == [".yaml"] * len(paths), (
        "Flux takes a folder file by file where it has no kustomization.yaml"
    )
    for path in paths:
        assert load_manifest(path).run.metadata.name == path.stem


def test_an_overlay_is_a_separate_run_with_its_changes(kubectl: Path) -> None:
    made = {}
    for folder in sorted((EXAMPLES / "overlays").iterdir()):
        text = run([kubectl, "kustomize", folder])
        [made[folder.name]] = yaml.safe_load_all(text)
    assert problems_of(list(made.values())) == []
    assert {name: one["metadata"]["name"] for name, one in made.items()} == {
        "base": "docs-lm",
        "long": "docs-lm-long",
        "wide": "docs-lm-wide",
    }
    base, long, wide = (made[name]["spec"] for name in ("base", "long", "wide"))
    assert base["training"]["horizon"]["steps"] * 2 == long["training"]["horizon"]["steps"]
    config = wide["training"]["model"]["config"]
    assert config == {
        **base["training"]["model"]["config"],
        "hidden_size": 128,
        "intermediate_size": 256,
    }


def test_a_family_has_one_run_per_combination_and_can_grow_without_changes_to_the_others(
    tmp_path: Path,
) -> None:
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")

    def render(**values: Any) -> dict[str, Any]:
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        text = chart.helm("template", "f", EXAMPLES / "family", "--values", file).stdout
        runs = [one for one in yaml.safe_load_all(text) if one]
        assert problems_of(runs) == []
        return {one["metadata"]["name"]: one for one in runs}

    four = render()
    assert sorted(four) == [
        "docs-lm-0-001-1",
        "docs-lm-0-001-2",
        "docs-lm-0-003-1",
        "docs-lm-0-003-2",
    ]
    training = four["docs-lm-0-003-2"]["spec"]["training"]
    assert (training["optimizer"], training["reproducibility"]) == (
        {"type": "adamw", "learningRate": 3e-3},
        {"seed": 2},
    )
    six = render(seeds=[1, 2, 3], learningRates=[1e-3, 3e-3])
    assert len(six) == 6 and {name: six[name] for name in four} == four


@pytest.mark.timeout(1800)  # modules may have to be fetched first
def test_argo_cd_and_flux_accept_their_objects(tmp_path: Path) -> None:
    if shutil.which("go") is None or toolbox.missing(("kubeconform",)):
        pytest.skip("kubeconform or `go` is not here. make chart-lint builds the former.")
    made = [*objects_of("argocd"), *objects_of("flux")]
    known = [one for one in made if one["kind"] not in UNKNOWN]
    assert {one["kind"] for one in known} == {
        "Application",
        "ApplicationSet",
        "ConfigMap",
        "Kustomization",
    }
    file = tmp_path / "gitops.yaml"
    file.write_text(yaml.safe_dump_all(known))
    summary = chart.conform([file], more=schemas.of_gitops())
    assert f"Valid: {len(known)}, Invalid: 0, Errors: 0, Skipped: 0" in summary


def test_both_tools_install_the_release_as_on_the_pages() -> None:
    # Flux puts the target namespace before a name that it is not given.
    of_flux = find("flux", "HelmRelease", "evergrad")["spec"]
    of_argo = find("argocd", "Application", "evergrad")["spec"]
    assert of_flux["releaseName"] == of_argo["source"]["helm"]["releaseName"] == "evergrad"
    assert of_flux["targetNamespace"] == of_argo["destination"]["namespace"]


def test_no_tool_is_configured_to_replace_or_force_a_run() -> None:
    for path in EXAMPLES.rglob("*.yaml"):
        text = path.read_text("utf-8")
        assert "Replace=true" not in text and "Force=true" not in text, path
        assert not re.search(r"^\s*force: true", text, re.MULTILINE), path


def test_paths_in_the_objects_exist() -> None:
    of_argo = [
        find("argocd", "Application", name)["spec"]["source"]["path"]
        for name in ("evergrad", "runs")
    ]
    generator = find("argocd", "ApplicationSet", "experiments")["spec"]["generators"][0]
    [folders, left_out] = generator["git"]["directories"]
    of_flux = find("flux", "Kustomization", "runs")["spec"]["path"]
    for path in (*of_argo, of_flux, left_out["path"]):
        assert (ROOT / path).is_dir(), path
    assert len(list(ROOT.glob(folders["path"]))) == 3
