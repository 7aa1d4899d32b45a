"""``evergrad validate`` enforces each bound of the CustomResourceDefinition, too: a value just outside a
bound is refused with the path of its field."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_cli.main import main
from evergrad_manifest.model.fields import format_path
from evergrad_manifest.model.raw import FieldPath
from evergrad_manifest.reading.validation import check_run

ROOT = Path(__file__).resolve().parents[3]
BASE = Path(__file__).parent / "base_manifest.yaml"
HEAD = {
    "apiVersion": "evergrad.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "a"},
}
KEY = "key"
"""Key of mappings with user-defined keys."""
ODD_TEXTS = ("!", "a b", "-", "")
"""Texts, one of which each pattern refuses."""

Schema = dict[str, Any]


def nodes(schema: Schema, path: FieldPath) -> Iterator[tuple[FieldPath, Schema]]:
    """Return every value that the schema describes, with its path in an object that has one of each."""
    yield path, schema
    for key, node in schema.get("properties", {}).items():
        yield from nodes(node, (*path, key))
    if "items" in schema:
        yield from nodes(schema["items"], (*path, 0))
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], (*path, KEY))


def filler(schema: Schema) -> Any:
    """Return a value of the type that ``schema`` requires."""
    if "enum" in schema:
        return schema["enum"][0]
    values = {"object": {}, "array": [], "string": "a", "boolean": True}
    return values.get(schema.get("type", ""), 1)


def just_beyond(bound: float, *, up: bool) -> float:
    step = 1 if up else -1
    return (
        bound + step if isinstance(bound, int) else math.nextafter(bound, step * math.inf)
    )


def outside(schema: Schema) -> Iterator[tuple[str, Any]]:
    """Yield each bound of ``schema`` with a value just outside it."""
    if (most := schema.get("maxLength")) is not None:
        yield "maxLength", "a" * (most + 1)
    if least := schema.get("minLength"):
        yield "minLength", "a" * (least - 1)
    if (pattern := schema.get("pattern")) is not None:
        yield "pattern", next(text for text in ODD_TEXTS if not re.search(pattern, text))
    if (most := schema.get("maxItems")) is not None:
        yield "maxItems", [filler(schema["items"])] * (most + 1)
    if least := schema.get("minItems"):
        yield "minItems", [filler(schema["items"])] * (least - 1)
    if (most := schema.get("maxProperties")) is not None:
        value = filler(schema.get("additionalProperties", {}))
        yield "maxProperties", {f"{KEY}{number}": value for number in range(most + 1)}
    for word, up in (("minimum", False), ("maximum", True)):
        if (bound := schema.get(word)) is not None:
            exclusive = schema.get(f"exclusive{word.capitalize()}")
            yield word, bound if exclusive else just_beyond(bound, up=up)
    if "enum" in schema:
        yield "enum", "no such word"


def placed(path: FieldPath, value: Any) -> Any:
    for part in reversed(path):
        value = [value] if part == 0 else {part: value}
    return value


def cases() -> Iterator[tuple[FieldPath, str, Any]]:
    definition = yaml.safe_load((ROOT / "crds/trainingrun.yaml").read_text())
    root = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, schema in nodes(root["properties"]["spec"], ("spec",)):
        for word, value in outside(schema):
            yield path, word, value


CASES = list(cases())


def test_the_definition_has_bounds_of_each_kind() -> None:
    kinds = {
        "maxLength",
        "minLength",
        "pattern",
        "maxItems",
        "minItems",
        "maxProperties",
        "minimum",
        "maximum",
        "enum",
    }
    assert {word for _, word, _ in CASES} == kinds
    assert len(CASES) > 700


@pytest.mark.parametrize(
    ("path", "word", "value"),
    CASES,
    ids=[f"{format_path(path)}-{word}" for path, word, _ in CASES],
)
def test_a_value_just_outside_a_bound_is_refused_with_the_path_of_its_field(
    path: FieldPath, word: str, value: Any
) -> None:
    _, problems = check_run({**HEAD, **placed(path, value)})
    where = format_path(path)
    # A tuple of two numbers names the missing one.
    wanted = {where, f"{where}[{len(value)}]"} if word == "minItems" else {where}
    found = [str(one) for one in problems if one.path in wanted]
    assert found, [str(one) for one in problems]
    assert all(text.endswith((".", "?")) for text in found)


def test_the_command_reports_where_what_why_and_a_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overlay = tmp_path / "overlay.yaml"
    labels = {f"key{number}": "a" for number in range(129)}
    template = {"labels": labels, "priorityClassName": "a" * 5000}
    overlay.write_text(yaml.safe_dump({"spec": {"template": template}}))
    assert main(["validate", str(BASE), "--overlay", str(overlay)]) == 64
    said = re.sub(r" \([^()]* line \d+\)", "", capsys.readouterr().err)
    assert (
        "error: spec.template.labels: has 129 keys; at most 128 are allowed. Remove some."
        in said
    )
    assert "error: spec.template.priorityClassName: 'aaaa" in said


def test_a_problem_of_the_whole_spec_does_not_hide_problems_of_its_parts() -> None:
    """Neither training nor script is set, and a volume has a wrong mode."""
    volume = {"name": "a", "configMap": {"name": "a", "defaultMode": 512}}
    _, problems = check_run({**HEAD, "spec": {"template": {"volumes": [volume]}}})
    assert {one.path for one in problems} == {
        "spec",
        "spec.template.volumes[0].configMap.defaultMode",
    }


@pytest.mark.parametrize("where", ["metadata", "spec.template"])
def test_annotations_are_bounded_in_total_like_in_the_api_server(where: str) -> None:
    def problems(length: int) -> list[str]:
        # Each of them is within the definition's own bounds.
        texts = {f"a{number:02}": "a" * (length - 3) for number in range(64)}
        object_ = {**HEAD, "metadata": {"name": "a"}, "spec": {"template": {}}}
        section = (
            object_["metadata"] if where == "metadata" else object_["spec"]["template"]
        )
        section["annotations"] = texts
        found = check_run(object_)[1]
        return [str(one) for one in found if one.path == f"{where}.annotations"]

    assert problems(4096) == []
    [said] = problems(4097)
    assert said == (
        f"{where}.annotations: 262208 bytes are too many; an API server keeps at most 262144 bytes of "
        "annotations, keys and values together. Shorten them."
    )
