"""What 0.1.0 left on a cluster is still understood: its values, its CRD, the fields of a Deployment that never change.

tests/earlier has its chart, as it was packed. On a cluster: tests/e2e/test_upgrade.py.
"""

import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bed import chart, toolbox

COMMIT = "05accba"
Schema = dict[str, Any]


@pytest.fixture(scope="module")
def packed(root: Path) -> Path:
    return root / "tests/earlier/evergrad-0.1.0.tgz"


@pytest.fixture(scope="module")
def files(packed: Path) -> dict[str, str]:
    found = {}
    with tarfile.open(packed) as archive:
        for member in archive.getmembers():
            opened = archive.extractfile(member)
            assert opened is not None
            found[member.name] = opened.read().decode()
    return found


@pytest.fixture(scope="module")
def renderings(
    packed: Path, files: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The Deployments of both charts, of the values that 0.1.0 had by default."""
    if toolbox.missing(("helm",)):
        pytest.skip("helm is not built. make chart-lint builds it, with Go.")
    options = ("--kube-version", chart.KUBERNETES, "--namespace", chart.NAMESPACE)
    text = chart.helm("template", "evergrad", packed, *options).stdout
    objects = (one for one in yaml.safe_load_all(text) if one)
    (before,) = (one for one in objects if one["kind"] == "Deployment")
    (after,) = (
        one
        for one in chart.render(yaml.safe_load(files["evergrad/values.yaml"]))
        if one["kind"] == "Deployment"
    )
    return before, after


def test_the_packed_chart_is_the_chart_of_the_first_release(
    root: Path, files: dict[str, str]
) -> None:
    def read(name: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-c", "safe.directory=*", "show", f"{COMMIT}:charts/{name}"]
        return subprocess.run(
            command, cwd=root, capture_output=True, text=True, check=False
        )

    if read("evergrad/Chart.yaml").returncode != 0:
        pytest.skip(f"The history here does not have {COMMIT}. Fetch all of it.")
    assert "evergrad/values.yaml" in files
    for name, text in files.items():
        # `helm package` writes Chart.yaml again.
        same = yaml.safe_load if name.endswith("Chart.yaml") else str
        assert same(read(name).stdout) == same(text), name


def test_the_values_of_the_first_release_are_still_accepted(
    renderings: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    _, after = renderings
    assert after["spec"]["replicas"] == 1


def test_immutable_fields_of_the_deployment_do_not_change(
    renderings: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    before, after = renderings
    assert before["metadata"]["name"] == after["metadata"]["name"]
    assert before["spec"]["selector"] == after["spec"]["selector"]


def test_the_new_crd_has_every_field_of_the_old_one(
    root: Path, files: dict[str, str]
) -> None:
    old, new = (
        yaml.safe_load(text)["spec"]
        for text in (
            files["evergrad/files/trainingrun.yaml"],
            (root / "crds/trainingrun.yaml").read_text(),
        )
    )
    assert (old["group"], old["names"]["plural"]) == (new["group"], new["names"]["plural"])
    versions = {one["name"]: one for one in new["versions"]}
    for one in old["versions"]:
        assert versions[one["name"]]["served"]
        differences = find_differences(
            one["schema"]["openAPIV3Schema"],
            versions[one["name"]]["schema"]["openAPIV3Schema"],
            path="",
        )
        assert list(differences) == []


def find_differences(old: Schema, new: Schema, *, path: str) -> Iterator[str]:
    """What objects that the old schema allowed may lose, or be refused for, under the new one.

    A whole number that could be written as text may have to be a number now, which only a change of that field
    meets: the API server does not check again what an update leaves alone.
    """
    was_either = old.get("x-kubernetes-int-or-string") is True
    has_choice = set(old.get("enum", ())) | (
        {True, False} if old.get("type") == "boolean" else set()
    )
    if old.get("type") != new.get("type") and not was_either and not has_choice:
        yield f"{path}: was {old.get('type')}, is {new.get('type')}"
    if "enum" in new and not (has_choice and has_choice <= set(new["enum"])):
        yield f"{path}: allows only {new['enum']}"
    for key in (
        "x-kubernetes-list-type",
        "x-kubernetes-list-map-keys",
        "x-kubernetes-map-type",
    ):
        if old.get(key) != new.get(key):
            yield f"{path}: {key} was {old.get(key)}, is {new.get(key)}"
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        yield f"{path}.{name}: is required now"
    for name, part in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from find_differences(
                part, new["properties"][name], path=f"{path}.{name}"
            )
        elif not new.get("x-kubernetes-preserve-unknown-fields"):
            yield f"{path}.{name}: is gone"
    for key in ("items", "additionalProperties"):
        if isinstance(old.get(key), dict):
            yield from find_differences(old[key], new.get(key, {}), path=f"{path}.{key}")


@pytest.mark.parametrize(
    ("old", "new", "difference"),
    [
        ({"type": "string"}, {"type": "integer"}, "was string, is integer"),
        ({"type": "string"}, {"type": "string", "enum": ["a"]}, "allows only"),
        ({"properties": {"a": {}}}, {"properties": {}}, ".a: is gone"),
        (
            {"properties": {"a": {}}},
            {"properties": {"a": {}}, "required": ["a"]},
            ".a: is required",
        ),
        (
            {"items": {"type": "string"}},
            {"items": {"type": "number"}},
            ".items: was string",
        ),
        (
            {"x-kubernetes-list-type": "map"},
            {"x-kubernetes-list-type": "atomic"},
            "list-type",
        ),
    ],
)
def test_a_removal_from_the_crd_is_detected(
    old: Schema, new: Schema, difference: str
) -> None:
    (found,) = find_differences(old, new, path="")
    assert difference in found


def test_an_addition_to_the_crd_is_not_a_difference() -> None:
    old = {
        "properties": {
            "a": {"type": "string", "enum": ["x"]},
            "n": {"x-kubernetes-int-or-string": True},
        }
    }
    new = {
        "properties": {
            "a": {"type": "string", "enum": ["x", "y"]},
            "n": {"type": "integer"},
            "b": {"type": "object"},
        }
    }
    assert list(find_differences(old, new, path="")) == []
