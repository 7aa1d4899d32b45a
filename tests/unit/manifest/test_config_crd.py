"""The generated CRD: structural, documented, bounded, within its size, and consistent with the models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from bed import toolbox
from evergrad_common.contract import API_VERSION, KIND
from evergrad_manifest import generate
from evergrad_manifest.crd.definition import (
    LARGEST_BYTES,
    LIMIT_BYTES,
    build_definition,
    build_root,
    count_bytes,
)
from evergrad_manifest.crd.rules import RULES
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.generate import DEFINITION
from evergrad_manifest.model.fields import walk_fields
from evergrad_manifest.reading.validation import check_run
from evergrad_manifest.structure.nodes import VALIDATIONS
from evergrad_manifest.structure.sections import LEFT_OUT, SHOWN_DEFAULTS
from evergrad_manifest.training.own_task import LONGEST_FILE_NAME
from evergrad_manifest.values.quantities import LONGEST_RUN_NAME

ROOT = Path(__file__).resolve().parents[3]
VALUE_WORDS = ("allOf", "anyOf", "oneOf", "not")


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every node that describes a value, with its path; not nodes inside ``anyOf`` and similar
    keywords, which only restrict."""
    yield path, schema
    for key, node in schema.get("properties", {}).items():
        yield from nodes(node, f"{path}.{key}".lstrip("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(build_root()))
PLAIN = {path: node for path, node in NODES.items() if path not in ("", "metadata")}


def test_every_field_has_a_description() -> None:
    for path, node in PLAIN.items():
        assert re.match(
            r"[A-Z`(<]|fp32|torch|jsonl|wsd|tokens", node.get("description", "")
        ), path
        assert "``" not in node["description"] and "\n" not in node["description"]


def test_field_descriptions_state_the_default_or_that_the_field_is_required() -> None:
    for field in walk_fields(TrainingRun):
        if (
            field.path.startswith("spec.")
            and field.path not in LEFT_OUT
            and field.shape.section is None
        ):
            text = NODES[field.path]["description"]
            assert "default" in text.casefold() or "required" in text, field.path


def test_the_definition_has_exactly_the_fields_of_the_models() -> None:
    ours = {
        field.path for field in walk_fields(TrainingRun) if field.path.startswith("spec")
    } - set(LEFT_OUT)
    below = ("spec.template.", "spec.training.model.config.")
    theirs = {
        re.sub(r"\{\}$", "", path)
        for path in PLAIN
        if path.startswith("spec") and not path.endswith("[]")
    }
    inside = {path for path in theirs if path.startswith(below) and path not in ours}
    assert theirs - inside == ours


def test_the_schema_is_structural() -> None:
    for path, node in NODES.items():
        assert not {"$ref", "title", "const", "nullable", "definitions", "examples"} & set(
            node
        ), path
        assert not ("properties" in node and "additionalProperties" in node), path
        is_open = node.get("x-kubernetes-preserve-unknown-fields") or node.get(
            "x-kubernetes-int-or-string"
        )
        assert node.get("type") or is_open, path
        if not node.get("x-kubernetes-int-or-string"):
            restricting = [
                branch for word in VALUE_WORDS for branch in _branches(node.get(word, []))
            ]
            assert not any(
                {"type", "description", "default"} & set(branch) for branch in restricting
            ), path


def _branches(branches: Any) -> list[dict[str, Any]]:
    return branches if isinstance(branches, list) else [branches]


def test_everything_of_variable_size_is_bounded() -> None:
    for path, node in PLAIN.items():
        if (
            path in ("apiVersion", "kind")
            or "enum" in node
            or node.get("format") == "date-time"
        ):
            continue
        kind = node.get("type")
        assert kind != "array" or "maxItems" in node, path
        assert kind != "string" or "maxLength" in node, path
        assert "additionalProperties" not in node or "maxProperties" in node, path
        is_open = kind == "object" and node.get("x-kubernetes-preserve-unknown-fields")
        is_open = is_open and "properties" not in node
        assert not is_open or "maxProperties" in node, path


def test_lists_are_merged_by_their_keys_or_replaced_as_a_whole() -> None:
    kinds = {
        path: node["x-kubernetes-list-type"]
        for path, node in NODES.items()
        if node.get("type") == "array"
    }
    keys = {
        path: NODES[path]["x-kubernetes-list-map-keys"]
        for path, kind in kinds.items()
        if kind == "map"
    }
    assert keys["status.conditions"] == ["type"]
    assert keys["spec.template.env"] == keys["spec.template.volumes"] == ["name"]
    for path, names in keys.items():
        assert set(names) <= set(NODES[path]["items"]["required"]), path
    assert kinds["spec.script.command"] == kinds["spec.training.data.sources"] == "atomic"


def test_rules_have_messages_with_the_problem_and_the_remedy() -> None:
    for path, node in NODES.items():
        for one in node.get(VALIDATIONS, []):
            assert one["message"].endswith(".") and ". " in one["message"], (
                path,
                one["message"],
            )
            assert len(one["message"]) <= 400
            assert "\n" not in one["rule"]
            blamed = (path + one.get("fieldPath", "")).lstrip(".")
            assert blamed in NODES, (path, one["fieldPath"])


def test_every_rule_is_in_the_definition() -> None:
    for path, rules in RULES.items():
        assert all(rule in NODES[path][VALIDATIONS] for rule in rules), path


def test_defaults_are_set_for_operational_fields_only() -> None:
    # The status's own default means that no component has observed the run.
    assert sorted(path for path, node in NODES.items() if "default" in node) == sorted(
        [*SHOWN_DEFAULTS, "status"]
    )
    assert not any(
        path.startswith(("spec.training", "spec.script")) for path in SHOWN_DEFAULTS
    )


def test_unknown_keys_of_evergrad_sections_reach_the_validation() -> None:
    """If an API server dropped them, it would keep a run in which a misspelled field has no effect."""
    for field in walk_fields(TrainingRun):
        if field.path.startswith("spec") and field.shape.section is not None:
            node = NODES[f"{field.path}[]" if field.shape.is_list else field.path]
            assert node["x-kubernetes-preserve-unknown-fields"] is True, field.path


def test_the_definition_has_space_for_further_recipes() -> None:
    assert count_bytes() < LARGEST_BYTES < LIMIT_BYTES


def test_the_size_of_the_definition_is_printed_with_its_limit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert generate.main(["--sizes"]) == 0
    [(file, sizes)] = json.loads(capsys.readouterr().out).items()
    assert (file, sizes["limit"]) == (DEFINITION, LIMIT_BYTES)
    assert (sizes["bytes"], sizes["bound"]) == (count_bytes(), LARGEST_BYTES)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_rules_cost_less_than_two_thirds_of_the_api_server_budget() -> None:
    """Cost estimates by Kubernetes' own code, which an API server computes when the definition is applied."""
    if reason := toolbox.unavailable("celcost"):
        pytest.skip(reason)
    found = toolbox.ask("celcost", build_definition())
    print(json.dumps({key: value for key, value in found.items() if key != "rules"}))
    assert len(found["rules"]) >= sum(map(len, RULES.values()))
    assert found["total"] > 0 and found["limitOfAll"] == 100_000_000
    assert found["total"] < found["limitOfAll"] * 2 // 3
    assert max(rule["cost"] for rule in found["rules"]) < found["limitOfARule"] * 2 // 3
    # A rule that the estimate must refuse: texts without a bound, compared with each other.
    definition = build_definition()
    spec = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"][
        "spec"
    ]
    spec["properties"]["words"] = {
        "type": "array",
        "items": {"type": "string"},
        VALIDATIONS: [{"rule": "self.all(one, self.exists_one(other, other == one))"}],
    }
    beyond = toolbox.ask("celcost", definition)
    assert beyond["total"] > beyond["limitOfAll"]
    assert {one["path"] for one in beyond["rules"]} == {
        *(one["path"] for one in found["rules"]),
        "spec.words",
    }


def test_the_file_matches_the_builder_and_has_no_aliases() -> None:
    text = (ROOT / DEFINITION).read_text("utf-8")
    assert yaml.safe_load(text) == build_definition()
    assert not re.search(r"[&*]id[0-9]", text)


def test_group_version_kind_and_short_name_are_fixed() -> None:
    spec = build_definition()["spec"]
    (version,) = spec["versions"]
    assert f"{spec['group']}/{version['name']}" == API_VERSION
    assert spec["names"]["kind"] == KIND and spec["names"]["shortNames"] == ["trun"]
    assert version["subresources"] == {"status": {}}


def test_the_longest_run_name_leaves_valid_names_for_all_children() -> None:
    from evergrad_operator.core.objects import names

    run = "x" * LONGEST_RUN_NAME
    assert LONGEST_RUN_NAME == names.LONGEST_RUN_NAME
    children = [
        names.node_pod_name(run, 1023, 999_999),
        names.coordinator_pod_name(run, 9_999),
        names.coordinator_service_name(run),
        names.config_name(run),
        names.claim_annotation(run).rpartition("/")[2],
    ]
    assert max(map(len, children)) <= 63


@pytest.mark.parametrize(
    "column",
    build_definition()["spec"]["versions"][0]["additionalPrinterColumns"],
    ids=lambda one: one["name"],
)
def test_each_printer_column_reads_an_existing_field(column: dict[str, Any]) -> None:
    path = column["jsonPath"].removeprefix(".")
    if path.startswith("metadata."):
        assert column["type"] == "date"
    else:
        assert NODES[path]["type"] == column["type"]


def test_the_api_server_bounds_the_name_of_a_carried_file_too() -> None:
    [said] = NODES["spec.training.files"][VALIDATIONS]
    assert said["rule"] == f"self.all(name, size(name) <= {LONGEST_FILE_NAME})"
    name = "a" * LONGEST_FILE_NAME
    _, problems = check_run(
        {"spec": {"training": {"recipe": "a:B", "files": {"a.py": "", f"{name}.py": ""}}}}
    )
    [found] = [one for one in problems if one.path == "spec.training.files"]
    assert found.what.endswith("is too long") and "at most 200 characters" in found.why
