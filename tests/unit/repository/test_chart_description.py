"""The description of the chart: README, schema, and the annotations that Artifact Hub reads."""

import base64
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from evergrad_manifest.reading.loader import load_manifest


@pytest.fixture(scope="module")
def chart_values(root: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location(
        "chart_values", root / "tools/docs/chart_values.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["chart_values"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["chart_values"]


@pytest.fixture(scope="module")
def described(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(
        (root / "charts/evergrad/Chart.yaml").read_text()
    )
    return found


def annotation(described: dict[str, Any], name: str) -> Any:
    return yaml.safe_load(described["annotations"][f"artifacthub.io/{name}"])


def test_readme_and_schema_are_generated_from_the_comments(root: Path) -> None:
    result = subprocess.run(
        [sys.executable, root / "tools/docs/chart_values.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_every_value_has_a_description_in_the_schema(root: Path) -> None:
    schema = json.loads((root / "charts/evergrad/values.schema.json").read_text())
    values = yaml.safe_load((root / "charts/evergrad/values.yaml").read_text())

    def find_bare(found: dict[str, Any], part: dict[str, Any], path: str) -> list[str]:
        bare = []
        for key, value in found.items():
            inner = part["properties"][key]
            if (
                isinstance(value, dict)
                and set(value) == set(inner.get("properties", ())) != set()
            ):
                bare += find_bare(value, inner, f"{path}.{key}")
            elif not inner.get("description", "").endswith("."):
                bare.append(f"{path}.{key}")
        return bare

    assert find_bare(values, schema, "") == []


SCHEMA = {
    "properties": {
        "plain": {"enum": ["a", ""]},
        "section": {
            "properties": {"inner": {"type": "integer"}, "open": {"type": "object"}}
        },
    }
}


def test_a_description_is_the_comment_above_and_the_one_on_the_line(
    chart_values: ModuleType,
) -> None:
    text = """
# Nothing of a value: a line without one follows.

# Above
# it.
plain: ""  # On its line.
section:
  inner: 3  # A number: # and all.
  # An object.
  open:
    any: {thing: 1}
"""
    values = list(chart_values.read_values(text, json.loads(json.dumps(SCHEMA))))
    assert [(".".join(one.path), one.description) for one in values] == [
        ("plain", "Above it. On its line."),
        ("section", ""),
        ("section.inner", "A number: # and all."),
        ("section.open", "An object."),
    ]
    assert chart_values.find_problems(values) == []
    assert chart_values.render_table(values).splitlines()[2:] == [
        '| `plain` | `""` | Above it. On its line. One of `a`. |',
        "| `section.inner` | `3` | A number: # and all. |",
        "| `section.open` | `{any: {thing: 1}}` | An object. |",
    ]


def test_a_value_without_a_comment_is_refused_by_its_path(chart_values: ModuleType) -> None:
    text = "section:\n  inner: 3\n  open: {}  # Described.\n"
    values = list(chart_values.read_values(text, json.loads(json.dumps(SCHEMA))))
    (problem,) = chart_values.find_problems(values)
    assert problem.startswith("values.yaml: section.inner: has no description. ")


def test_the_artifact_hub_annotations_list_the_images_of_the_values(
    root: Path, described: dict[str, Any]
) -> None:
    values = yaml.safe_load((root / "charts/evergrad/values.yaml").read_text())
    assert [one["image"] for one in annotation(described, "images")] == [
        f"{part['repository']}:{described['appVersion']}"
        for part in (values["image"], values["trainer"]["image"])
    ]


def test_the_artifact_hub_annotations_describe_the_installed_crd(
    root: Path, described: dict[str, Any]
) -> None:
    crd = yaml.safe_load((root / "crds/trainingrun.yaml").read_text())
    (told,) = annotation(described, "crds")
    assert told["name"] == crd["metadata"]["name"]
    assert told["kind"] == crd["spec"]["names"]["kind"]
    assert told["version"] in {
        one["name"] for one in crd["spec"]["versions"] if one["served"]
    }


def test_the_artifact_hub_example_is_a_valid_run(
    described: dict[str, Any], tmp_path: Path
) -> None:
    (example,) = annotation(described, "crdsExamples")
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(example))
    assert load_manifest(file).run.metadata.name == "example"


def test_the_icon_is_the_drawing_in_the_chart_folder(
    root: Path, described: dict[str, Any]
) -> None:
    kind, _, data = described["icon"].partition(",")
    assert kind == "data:image/svg+xml;base64"
    drawing = base64.b64decode(data)
    assert drawing == (root / "charts/evergrad/icon.svg").read_bytes()
    assert ElementTree.fromstring(drawing).tag == "{http://www.w3.org/2000/svg}svg"


def test_the_changes_have_kinds_that_artifact_hub_supports(
    described: dict[str, Any],
) -> None:
    known = {"added", "changed", "deprecated", "removed", "fixed", "security"}
    changes = annotation(described, "changes")
    assert changes
    for one in changes:
        assert set(one) == {"kind", "description"}
        assert one["kind"] in known
        assert re.fullmatch(r".{10,200}\.", one["description"])


def test_the_changes_list_the_additions_of_the_changelog_for_administrators(
    root: Path, described: dict[str, Any]
) -> None:
    unreleased = (root / "CHANGELOG.md").read_text().partition("## [0.1.0]")[0]
    told = " ".join(one["description"] for one in annotation(described, "changes"))
    for word in (
        *("rofiles", "angs", "price", "evergrad prune", "IPv6", "managedBy", "webhook"),
        *("alerts", "dashboards", "metricsFrom", "operatorPolicy", "hostNetwork", "token"),
    ):
        assert word in told and word in unreleased, word
