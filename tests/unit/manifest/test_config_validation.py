"""The table of bad manifests: each problem is found at its path, with these words, and no other problem is
reported."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_cli.main import main
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.model.base import Section
from evergrad_manifest.model.fields import choices_of, fields_of
from evergrad_manifest.model.view import UNKNOWN, View, without_nulls
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.validation import check_run, parse_run
from evergrad_manifest.training import Optimizer, Schedule, Source, Tokenizer, sft

FOLDER = Path(__file__).parent
BASE = FOLDER / "base_manifest.yaml"
TABLE: list[dict[str, Any]] = yaml.safe_load((FOLDER / "bad_manifests.yaml").read_text())


def as_override(path: str, value: Any) -> str:
    text = (
        value
        if isinstance(value, str)
        else yaml.safe_dump(value, default_flow_style=True, width=10**6)
        .split("\n...")[0]
        .strip()
    )
    return f"{path}={text}"


@pytest.mark.acceptance("8d-8f")
def test_only_recipes_that_support_it_keep_documents_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packing = "spec.training.data.packing"
    assert load_manifest(BASE, overrides=[f"{packing}=documents"]).run is not None
    monkeypatch.setattr(sft, "KEEPS_APART", ("sft",))
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"{packing}=documents"])
    [problem] = refused.value.problems
    assert str(problem) == (
        f"{packing}: documents is not for recipe pretrain (--set); only sft keep the documents of a sample "
        "apart. Use concatenate."
    )


@pytest.mark.acceptance("input-A-54")
@pytest.mark.capability("A-55", "A-54", "O-1")
@pytest.mark.parametrize(
    ("section", "path"),
    [
        (Optimizer, "optimizer"),
        (Schedule, "schedule"),
        (Tokenizer, "tokenizer"),
        (Source, "data.sources[0]"),
    ],
)
def test_a_section_has_its_first_type_unless_it_sets_another_of_its_types(
    section: type[Section], path: str
) -> None:
    field = fields_of(section)["type"]
    first, *others = choices_of(field)
    assert field.default == first
    assert others
    where = f"spec.training.{path}.type"
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=[f"{where}=unknown"])
    [said] = [str(one) for one in refused.value.problems if one.path == where]
    assert f"'unknown' is not one of {', '.join((first, *others))}" in said
    assert main(["run", str(BASE), "--set", f"{where}=unknown"]) == 64


@pytest.mark.acceptance("input-G-4", "input-A-46", "input-2e-1", "input-4e-11")
@pytest.mark.acceptance(
    "8d-4h",
    "8d-8b",
    "8d-8d",
    "8d-8h",
    "8d-8i",
    "number-A-58",
    "input-G-6",
    "input-G-12",
    "input-G-60",
    "input-G-73",
    "input-G-82",
    "input-G-85",
    "input-C-30",
    "input-O-6",
    "input-O-73",
    "input-A-1",
    "input-A-17",
    "input-A-42",
    "input-A-43",
    "input-A-56",
    "input-A-68",
    "input-T-29",
    "input-T-41",
    "input-1e-12",
    "input-2e-2",
    "input-2e-3",
    "input-4e-2",
    "input-4e-14",
    "input-5e-12",
)
@pytest.mark.capability("O-6", "A-1", "A-4", "A-6", "A-28")
@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_each_bad_manifest_is_refused_with_exactly_its_problems(
    case: dict[str, Any],
) -> None:
    overrides = [as_override(path, value) for path, value in case["set"].items()]
    with pytest.raises(ConfigurationError) as refused:
        load_manifest(BASE, overrides=overrides)
    said = {problem.path: str(problem) for problem in refused.value.problems}
    assert sorted(said) == sorted(case["problems"]), "\n".join(said.values())
    for path, fragment in case["problems"].items():
        assert fragment in said[path]
    assert len(refused.value.problems) == len(said)


@pytest.mark.capability("G-X12", "G-X24")
@pytest.mark.acceptance(
    "input-G-4", "input-A-46", "input-2e-1", "input-4e-11", "input-1e-12", "input-2e-2"
)
@pytest.mark.acceptance(
    "input-G-6",
    "input-G-12",
    "input-A-18",
    "input-A-50",
    "input-T-42",
    "input-G-60",
    "input-G-73",
    "input-G-82",
    "input-G-85",
    "input-C-30",
    "input-O-6",
    "input-O-73",
    "input-A-1",
    "input-A-17",
    "input-A-42",
    "input-A-43",
    "input-A-56",
    "input-A-68",
    "input-T-29",
    "input-T-41",
    "input-1e-12",
    "input-2e-2",
    "input-2e-3",
    "input-4e-2",
    "input-4e-14",
    "input-5e-12",
)
@pytest.mark.parametrize("case", TABLE, ids=[case["name"] for case in TABLE])
def test_each_bad_manifest_ends_the_command_with_64_and_leaves_the_run_unchanged(
    case: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    overrides = [as_override(path, value) for path, value in case["set"].items()]
    arguments = [word for one in overrides for word in ("--set", one)]
    code = main(["run", str(BASE), "--run-directory", str(tmp_path), *arguments])
    said = capsys.readouterr()
    assert (code, said.out) == (64, "")
    lines = said.err.splitlines()
    assert len(lines) == len(case["problems"])
    assert all(line.startswith("error: ") for line in lines), said.err
    for path, fragment in case["problems"].items():
        assert any(path in line and fragment in line for line in lines), said.err
    assert [one.name for one in tmp_path.iterdir()] == ["run.json"]
    assert (tmp_path / "run.json").read_text() == "{}"


def test_the_names_of_the_cases_are_unique() -> None:
    names = [case["name"] for case in TABLE]
    assert len(names) == len(set(names))


GOOD: dict[str, dict[str, Any]] = yaml.safe_load(
    (FOLDER / "good_manifests.yaml").read_text()
)


@pytest.mark.acceptance("8d-8j", "input-2e-3")
@pytest.mark.parametrize("changes", GOOD.values(), ids=GOOD)
def test_valid_values_at_the_bounds_are_accepted(changes: dict[str, Any]) -> None:
    overrides = [
        as_override(path, "null" if value is None else value)
        for path, value in changes.items()
    ]
    assert load_manifest(BASE, overrides=overrides).run.spec.nodes.min


def test_the_base_manifest_has_no_problem() -> None:
    run, problems = check_run(yaml.safe_load(BASE.read_text()))
    assert problems == []
    assert run is not None and run.spec.training.horizon.tokens == 20_000_000


@pytest.mark.capability("O-34")
def test_an_empty_optional_section_gets_defaults_and_an_empty_required_one_is_reported() -> (
    None
):
    raw = yaml.safe_load(BASE.read_text())
    raw["spec"]["template"] = None
    raw["spec"]["training"]["schedule"] = None
    assert parse_run(raw).spec.training.schedule.type == "wsd"
    raw["spec"]["training"]["optimizer"] = None
    with pytest.raises(
        ConfigurationError,
        match=r"spec\.training\.optimizer: is empty; a mapping is needed with keys such as type",
    ):
        parse_run(raw)


def test_more_than_a_hundred_problems_are_counted() -> None:
    raw = yaml.safe_load(BASE.read_text())
    raw["spec"] |= {f"key{number}": 1 for number in range(150)}
    with pytest.raises(ConfigurationError) as refused:
        parse_run(raw)
    assert len(refused.value.problems) == 101
    assert "50 more problems are not listed" in str(refused.value.problems[-1])


@pytest.mark.parametrize(
    ("section", "value", "path"),
    [
        ("schedule", {"warmup": 200}, "schedule.warmup"),
        ("stop", {"afterStep": 101}, "stop.afterStep"),
        ("overrides", [{"fromStep": 101, "clipNorm": 0}], "overrides[0].fromStep"),
    ],
)
def test_the_steps_of_a_task_without_data_follow_from_a_horizon_in_tokens(
    section: str, value: Any, path: str
) -> None:
    # Each item counts as one token: 100 steps of 4.
    raw = yaml.safe_load(BASE.read_text())
    training = raw["spec"]["training"]
    for key in ("model", "data", "evaluation"):
        del training[key]
    training |= {
        "recipe": "mine:Task",
        "batching": {"globalBatchSize": 4, "microBatchSize": 1},
        "schedule": {"type": "constant"},
        "horizon": {"tokens": 400},
    }
    assert check_run(raw)[1] == []
    training |= {section: value}
    (problem,) = check_run(raw)[1]
    assert problem.path == f"spec.training.{path}" and "100 steps" in str(problem)

    # Where text is needed and missing, that alone is the problem.
    training["recipe"] = "pretrain"
    assert {one.path for one in check_run(raw)[1]} == {
        "spec.training.model",
        "spec.training.data",
    }


def test_the_view_of_a_valid_manifest_equals_the_parsed_manifest() -> None:
    raw = without_nulls(yaml.safe_load(BASE.read_text()), TrainingRun)
    run = parse_run(raw)
    assert _plain(View(raw, TrainingRun).tree) == _plain(
        run.model_dump(by_alias=True, mode="python")
    )


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def test_a_view_has_the_valid_values_next_to_invalid_ones() -> None:
    raw = copy.deepcopy(yaml.safe_load(BASE.read_text()))
    raw["spec"]["training"]["batching"] = {"globalBatchSize": "x", "microBatchSize": "4"}
    view = View(raw, TrainingRun)
    assert view.get("spec.training.batching.globalBatchSize") is UNKNOWN
    assert view.get("spec.training.batching.microBatchSize") == 4
    assert view.known("spec.training.batching.globalBatchSize", "spec.nodes.min") is None
    assert view.known("spec.nodes.min", "spec.nodes.max") == (2, 4)
