"""The generated reference and schema: complete, up to date, and consistent with the models."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_common.contract import API_VERSION, KIND
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.example import (
    EDITS,
    EXAMPLE,
    OWN_TASK,
    PAIRS,
    SCRIPT,
    SFT,
    TWO_STAGES,
)
from evergrad_manifest.generate import (
    REFERENCE,
    SCHEMA,
    build_reference,
    build_schema,
    main,
)
from evergrad_manifest.model.fields import fields_of, walk_fields
from evergrad_manifest.reading.validation import check_run
from evergrad_manifest.training import Training

BASE = Path(__file__).parent / "base_manifest.yaml"


def test_every_field_has_a_description_that_is_a_sentence() -> None:
    for field in walk_fields(TrainingRun):
        description = field.info.description or ""
        assert re.match(r"[A-Z`(<]|fp32|torch|jsonl|wsd|tokens", description), field.path
        assert description.endswith("."), field.path


def test_the_generated_files_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_drift_is_reported_and_regeneration_removes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    reference = tmp_path / REFERENCE
    reference.write_text(
        reference.read_text().replace("Peak learning rate.", "Something else.")
    )
    capsys.readouterr()
    assert main(["--check", "--root", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert f"{REFERENCE} is not up to date. Run `make generate`." in said
    assert "-| `spec.training.optimizer.learningRate`" in said and "Something else." in said
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0


def test_a_missing_file_is_drift(tmp_path: Path) -> None:
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert not (tmp_path / SCHEMA).exists()


def test_the_reference_has_each_field_once() -> None:
    rows = re.findall(
        r"^\| `([a-z][A-Za-z.\[\]]+)` \|", build_reference(), flags=re.MULTILINE
    )
    assert sorted(rows) == sorted(field.path for field in walk_fields(TrainingRun))


def test_the_reference_states_type_bounds_and_default() -> None:
    page = build_reference()
    assert (
        "| `spec.training.optimizer.learningRate` | number, above 0, at most 10 | required | "
        "Peak learning rate. |" in page
    )
    assert '| `spec.training.checkpoint.every` | mapping | `{"steps": 500}` |' in page
    assert "| `spec.training.optimizer.betas` | 2 numbers | `[0.9, 0.95]` |" in page
    assert "| `spec.script.command` | list of texts | required |" in page
    assert (
        "| `spec.training.runtime.compile` | one of `auto`, `on`, `off` | `auto` |" in page
    )


def _accepts(schema: dict[str, Any], value: Any, root: dict[str, Any]) -> bool:
    """The part of JSON schema that the generated schema uses."""
    if "$ref" in schema:
        return _accepts(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], value, root)
    if (
        "oneOf" in schema
        and sum(
            _accepts({"type": "object", **branch}, value, root)
            for branch in schema["oneOf"]
        )
        != 1
    ):
        return False
    if "anyOf" in schema:
        return any(_accepts(branch, value, root) for branch in schema["anyOf"])
    if ("const" in schema and value != schema["const"]) or (
        "enum" in schema and value not in schema["enum"]
    ):
        return False
    kind = schema.get("type")
    if kind == "object":
        return isinstance(value, dict) and _accepts_object(schema, value, root)
    if kind == "array":
        return isinstance(value, list) and all(
            _accepts(schema.get("items", {}), item, root) for item in value
        )
    if kind == "string":
        return (
            isinstance(value, str)
            and re.search(schema.get("pattern", ""), value) is not None
        )
    if kind in ("integer", "number"):
        return _accepts_number(schema, value, whole=kind == "integer")
    return (kind != "boolean" or isinstance(value, bool)) and (
        kind != "null" or value is None
    )


def _accepts_object(
    schema: dict[str, Any], value: dict[str, Any], root: dict[str, Any]
) -> bool:
    properties, more = (
        schema.get("properties", {}),
        schema.get("additionalProperties", True),
    )
    for key, item in value.items():
        if key not in properties and more is False:
            return False
        if not _accepts(
            properties.get(key, more if isinstance(more, dict) else {}), item, root
        ):
            return False
    return all(key in value for key in schema.get("required", []))


def _accepts_number(schema: dict[str, Any], value: Any, *, whole: bool) -> bool:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (whole and value != int(value))
    ):
        return False
    if value < schema.get("minimum", value) or value > schema.get("maximum", value):
        return False
    return not (
        value <= schema.get("exclusiveMinimum", value - 1)
        or value >= schema.get("exclusiveMaximum", value + 1)
    )


def schema_accepts(*changes: tuple[str, Any]) -> bool:
    schema = json.loads(build_schema())
    manifest = yaml.safe_load(BASE.read_text())
    for path, value in changes:
        node = manifest
        *parents, last = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return _accepts(schema, manifest, schema)


def test_the_schema_accepts_valid_and_human_readable_values() -> None:
    assert schema_accepts()
    assert schema_accepts(
        ("spec.training.data.sequenceLength", "1k"),
        ("spec.training.runtime.bucketSize", "4Mi"),
    )
    assert schema_accepts(
        ("spec.training.schedule.warmup", "5%"),
        ("spec.training.optimizer.betas", [0.9, "0.95"]),
    )
    assert schema_accepts(
        ("spec.training.runtime.compile", True),
        ("spec.storage.size", "500M"),
        ("spec.nodes.max", None),
    )
    assert schema_accepts(("spec.training.model.config", {"anything": [1, {}]}))
    assert schema_accepts(
        ("spec.training", None),
        ("spec.script", {"command": ["train.py"], "gracePeriodSeconds": 1000}),
    )
    assert schema_accepts(("spec.script", None))


@pytest.mark.parametrize(
    "change",
    [
        ("spec.training.zzz", 1),
        ("spec.training.data.sequenceLength", 4),
        ("spec.training.data.sequenceLength", "64Ki"),
        ("spec.training.optimizer.learningRate", 0),
        ("spec.training.schedule.type", "cosin"),
        ("spec.training.optimizer", {}),
        ("spec.nodes.max", 2000),
        ("spec.suspend", "yes"),
        ("metadata.name", "A"),
        ("apiVersion", "v1"),
        ("spec.template.containers", []),
        ("spec.storage.size", "20GB"),
        ("spec.script", {"command": ["train.py"]}),
        ("spec.training", None),
    ],
)
def test_the_schema_refuses_values_that_are_invalid_on_their_own(
    change: tuple[str, Any],
) -> None:
    assert not schema_accepts(change)


@pytest.mark.parametrize(
    "script",
    [{}, {"command": "train.py"}, {"command": ["a", 3]}, {"command": ["a"], "cwd": "b"}],
    ids=str,
)
def test_the_schema_refuses_a_script_with_values_that_are_invalid_on_their_own(
    script: dict[str, Any],
) -> None:
    assert not schema_accepts(("spec.training", None), ("spec.script", script))


def test_the_schema_has_a_description_of_each_field_and_no_pydantic_titles() -> None:
    schema = json.loads(build_schema())
    for definition in schema["$defs"].values():
        for name, field in definition["properties"].items():
            assert (
                field.get("description")
                or schema["$defs"][field["$ref"].rsplit("/", 1)[1]]["description"]
            ), name
            assert "title" not in field


def test_the_published_metric_names_are_the_names_of_the_coordinator() -> None:
    schema = json.loads(build_schema())
    assert schema["properties"]["apiVersion"]["const"] == API_VERSION
    assert schema["properties"]["kind"]["const"] == KIND


def test_each_section_has_an_example_that_validate_accepts() -> None:
    training = EXAMPLE["spec"]["training"]
    without = {key: value for key, value in EXAMPLE["spec"].items() if key != "training"}
    # A recipe without text has no use for these.
    of_text = ("data", "checkpoint", "initFrom")
    for kind in (
        {"training": training},
        {"training": {**training, **OWN_TASK}},
        {"training": {**training, **SFT}},
        {"training": {**training, **TWO_STAGES}},
        {"training": {**training, **PAIRS}},
        {
            "training": {
                **{key: training[key] for key in training if key not in of_text},
                **EDITS,
            }
        },
        {"script": SCRIPT},
    ):
        assert check_run({**EXAMPLE, "spec": {**without, **kind}})[1] == []
    assert {*training, *OWN_TASK, *SFT, *TWO_STAGES, *PAIRS, *EDITS} == set(
        fields_of(Training)
    )
    examples = re.findall(r"^```yaml\n(.*?)^```$", build_reference(), flags=re.M | re.S)
    shown = [next(iter(yaml.safe_load(text).items())) for text in examples]
    assert [key for key, _ in shown[1:]] == [*fields_of(Training), "script"]
    assert all(value is not None for _, value in shown)
