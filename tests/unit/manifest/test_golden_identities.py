"""Hashes of a set of specs are pinned, and a field that a later version adds changes none of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from evergrad_manifest import identity
from evergrad_manifest.envelope import Spec, TrainingRun
from evergrad_manifest.identity import (
    RECIPE_SECTIONS,
    changed_settings,
    config_hash,
    hashed_recipe,
    recipe_of,
    settings_hash,
)
from evergrad_manifest.model.base import Section, Switch
from evergrad_manifest.model.differences import changed_fields
from evergrad_manifest.model.fields import walk_fields
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.validation import parse_run
from evergrad_manifest.training import Data, Optimizer, Source, Training
from evergrad_manifest.training.two_stage_kl import DEFAULT_BETA

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[2]
BASE = FOLDER / "base_manifest.yaml"
GOLDEN: list[dict[str, Any]] = yaml.safe_load(
    (FOLDER / "golden_identities.yaml").read_text()
)
EXAMPLES = {
    "elastic": "d7700ccf853613b191b34ae4085d2f64764b2e4f7a011d5f6282035385b990d7",
    "pydoc": "94478a20741fbc81cd81e73664677bbc6f407f71bd59125c5a6a93ba4fe33c25",
    "quickstart": "5cf14ce3237b0ad8e656fa4b1b2fc35d3729639e2ca5b7e49673621c0aa9ff61",
}


def document(case: dict[str, Any]) -> dict[str, Any]:
    head = {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "golden"},
    }
    return {**head, "spec": case["spec"]}


class Shards(Section):
    """A section that a later version might add."""

    count: int = 1
    names: tuple[str, ...] = ()
    further: Switch = False


class LaterSource(Source):
    """A source with further fields."""

    format: str = "plain"
    glob: Switch = False


class LaterData(Data):
    """Data with further fields."""

    sources: tuple[LaterSource, ...] = Field(min_length=1)
    shards: Shards = Shards()
    filter: str | None = None


class LaterOptimizer(Optimizer):
    """An optimizer with further fields."""

    friction: float = 0.95
    teams: dict[str, Any] = Field(default_factory=dict)


class LaterTraining(Training):
    """A recipe of a later version."""

    data: LaterData = LaterData.model_construct(set(), sources=(), sequence_length=1)
    optimizer: LaterOptimizer


class LaterSpec(Spec):
    """The spec of a later version."""

    training: LaterTraining | None = None


class LaterRun(TrainingRun):
    """The run of a later version."""

    spec: LaterSpec


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_the_recipe_hash_of_each_golden_spec_is_unchanged(case: dict[str, Any]) -> None:
    assert config_hash(parse_run(document(case))) == case["hash"]


TYPED = [case for case in GOLDEN if "training" in case["spec"]]


@pytest.mark.parametrize("case", TYPED, ids=[case["name"] for case in TYPED])
def test_the_settings_hash_of_each_golden_spec_is_unchanged(
    case: dict[str, Any],
) -> None:
    # Each hash was calculated by the version before matmulPrecision, attention, shards and selective
    # recomputation.
    assert settings_hash(parse_run(document(case))) == case["settings"]


def test_the_old_spelling_of_activation_checkpointing_keeps_its_settings_hash() -> None:
    switch = "spec.training.runtime.activationCheckpointing"
    found = [
        settings_hash(load_manifest(BASE, overrides=[f"{switch}={value}"]).run)
        for value in ("true", "full", "false", "none", "selective")
    ]
    assert found[:4] == 2 * ["89117bd99b862060"] + 2 * ["236ae4381204ff44"]
    assert found[4] not in found[:4]


@pytest.mark.parametrize(
    "setting",
    ["attention=math", "matmulPrecision=high", "parallelism=fsdp2", "shards=2"],
)
def test_a_later_setting_changes_the_settings_hash_if_it_is_set(setting: str) -> None:
    raw = load_manifest(BASE).raw
    key, value = setting.split("=")
    raw["spec"]["training"]["runtime"] = {"parallelism": "fsdp2"} if key == "shards" else {}
    before = settings_hash(parse_run(raw))
    raw["spec"]["training"]["runtime"][key] = yaml.safe_load(value)
    assert settings_hash(parse_run(raw)) != before


@pytest.mark.parametrize(
    "change",
    [
        {"logging": {"trackers": [{"type": "tensorboard"}]}},
        {"logging": {"profile": {"steps": 2}}},
        {"monitors": [{"type": "divergence", "metric": "loss"}]},
        {"stop": {"early": {"metric": "loss", "patience": 3}}},
    ],
    ids=["tracker", "profile", "monitor", "early stop"],
)
def test_observers_are_no_part_of_the_recipe_but_restart_the_nodes(
    change: dict[str, Any],
) -> None:
    raw = document(TYPED[0])
    before = parse_run(raw)
    training = {**raw["spec"]["training"], **change}
    after = parse_run({**raw, "spec": {**raw["spec"], "training": training}})
    assert config_hash(after) == config_hash(before)
    assert settings_hash(after) != settings_hash(before)


def test_logging_settings_of_one_machine_do_not_change_the_settings_hash() -> None:
    raw = document(TYPED[0])
    before = settings_hash(parse_run(raw))
    logging = {"every": {"steps": 3}, "peakFlops": 1e12}
    training = {**raw["spec"]["training"], "logging": logging}
    after = parse_run({**raw, "spec": {**raw["spec"], "training": training}})
    assert settings_hash(after) == before


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_hash_of_each_example_is_unchanged(name: str) -> None:
    assert (
        config_hash(load_manifest(ROOT / "examples" / name / "trainingrun.yaml").run)
        == EXAMPLES[name]
    )


def test_every_recipe_field_is_set_by_a_golden_spec() -> None:
    said = {path for case in GOLDEN for path in paths_of(case["spec"], "")}
    fields = {field.path.removeprefix("spec.") for field in walk_fields(TrainingRun)}
    recipe = {
        path
        for path in fields
        if path.startswith(
            ("script.", *(f"training.{section}" for section in RECIPE_SECTIONS))
        )
    }
    assert recipe - said == set()


def paths_of(value: Any, prefix: str) -> set[str]:
    """Return the path of each field that ``value`` sets, with ``[]`` for items of a list."""
    if isinstance(value, list):
        return {prefix} | {path for item in value for path in paths_of(item, f"{prefix}[]")}
    if not isinstance(value, dict):
        return {prefix}
    start = f"{prefix}." if prefix else ""
    return {prefix} | {
        path for key, item in value.items() for path in paths_of(item, f"{start}{key}")
    }


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_a_field_added_by_a_later_version_does_not_change_hashes_of_files_without_it(
    case: dict[str, Any],
) -> None:
    later = LaterRun.model_validate(json.loads(json.dumps(document(case))))
    assert config_hash(later) == case["hash"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("data", "shards"), {"count": 2}),
        (("data", "filter"), "short"),
        (("data", "sources"), [{"name": "a", "path": "a.jsonl", "glob": True}]),
        (("optimizer", "friction"), 0.9),
        (("optimizer", "teams"), {"head": {"learningRate": 1}}),
    ],
    ids=["section", "optional", "item of a list", "number", "mapping"],
)
def test_a_later_field_changes_the_hash_if_it_is_set(
    path: tuple[str, str], value: Any
) -> None:
    raw = json.loads(json.dumps(document(GOLDEN[0])))
    raw["spec"]["training"][path[0]][path[1]] = value
    assert config_hash(LaterRun.model_validate(raw)) != GOLDEN[0]["hash"]


@pytest.mark.acceptance("input-4e-1")
def test_a_later_field_with_its_default_has_the_hash_of_a_file_without_it() -> None:
    raw = json.loads(json.dumps(document(GOLDEN[0])))
    raw["spec"]["training"]["optimizer"] |= {"friction": 0.95, "teams": {}}
    raw["spec"]["training"]["data"]["shards"] = {"count": 1}
    assert config_hash(LaterRun.model_validate(raw)) == GOLDEN[0]["hash"]


def test_the_recipe_in_a_checkpoint_has_no_later_field_that_the_file_does_not_set() -> None:
    # A refused resume compares the fields: a field that neither side set would be reported, too.
    recipe = hashed_recipe(LaterRun.model_validate(document(GOLDEN[0])))
    assert recipe == hashed_recipe(parse_run(document(GOLDEN[0])))
    assert recipe["runtime"] == {"precision": "bf16-autocast"}
    assert not {"horizon", "options"} & recipe.keys()


def test_a_later_field_with_a_changed_default_gives_the_old_hash_only_to_the_old_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The field was added with 0.9 and has 0.95 today: a file that does not set it has another meaning than
    # before.
    monkeypatch.setitem(identity.FIRST_DEFAULTS, "training.optimizer.friction", 0.9)
    raw = json.loads(json.dumps(document(GOLDEN[0])))
    assert config_hash(LaterRun.model_validate(raw)) != GOLDEN[0]["hash"]
    raw["spec"]["training"]["optimizer"]["friction"] = 0.9
    assert config_hash(LaterRun.model_validate(raw)) == GOLDEN[0]["hash"]


def test_defaults_of_the_recipe_are_unchanged() -> None:
    """A changed default changes the meaning of files.

    If the default of a later field changes, its old value must be added to FIRST_DEFAULTS first.
    """
    golden = next(case for case in GOLDEN if case["name"] == "the least that a recipe says")
    recipe = recipe_of(parse_run(document(golden)))
    assert recipe == {
        "recipe": "pretrain",
        "options": {},
        "model": {"config": {"model_type": "llama"}, "configOverrides": {}},
        "tokenizer": {"type": "byte"},
        "data": {
            "sources": [
                {
                    "name": "a",
                    "type": "jsonl",
                    "path": "a.jsonl",
                    "weight": 1.0,
                    "textField": "text",
                }
            ],
            "sequenceLength": 64,
            "packing": "concatenate",
            "mixing": "shares",
            "overfitFirstBatch": False,
            "malformed": "refuse",
        },
        "batching": {"globalBatchSize": 4, "microBatchSize": 4},
        "optimizer": {
            "type": "adamw",
            "learningRate": 0.001,
            "betas": [0.9, 0.95],
            "epsilon": 1e-08,
            "weightDecay": 0.1,
            "clipNorm": 1.0,
            "groups": [],
        },
        "schedule": {
            "type": "wsd",
            "warmup": 0,
            "startRatio": 0.0,
            "decay": 0.2,
            "decayShape": "linear",
            "minimumRatio": 0.0,
        },
        "horizon": {"steps": 10},
        "reproducibility": {"seed": 0, "elastic": "fast", "deterministic": False},
        "runtime": {
            "precision": "bf16-autocast",
            "matmulPrecision": "highest",
            "attention": "auto",
        },
    }


def test_the_default_packing_of_rows_has_the_same_hash_if_it_is_written_out() -> None:
    raw = next(document(case) for case in GOLDEN if case["name"].startswith("rows, with"))
    raw = json.loads(json.dumps(raw))
    left_out = config_hash(parse_run(raw))
    raw["spec"]["training"]["data"]["packing"] = "documents"
    assert config_hash(parse_run(raw)) == left_out
    raw["spec"]["training"]["data"]["packing"] = "none"
    assert config_hash(parse_run(raw)) != left_out

    # Texts keep the hash from before the choice existed.
    texts = json.loads(json.dumps(document(GOLDEN[0])))
    texts["spec"]["training"]["data"]["packing"] = "concatenate"
    assert config_hash(parse_run(texts)) == GOLDEN[0]["hash"]


def test_the_default_weight_of_a_penalty_has_the_same_hash_if_it_is_written_out() -> None:
    name = "two stages with all at its default"
    golden = next(case for case in GOLDEN if case["name"] == name)
    before = parse_run(document(golden))

    def with_beta(first: float, second: float) -> TrainingRun:
        raw = json.loads(json.dumps(document(golden)))
        stages = raw["spec"]["training"]["twoStageKl"]["stages"]
        stages[0]["beta"], stages[1]["beta"] = first, second
        return parse_run(raw)

    same, other = with_beta(0, DEFAULT_BETA), with_beta(0, 2 * DEFAULT_BETA)
    assert (config_hash(same), settings_hash(same)) == (golden["hash"], golden["settings"])
    assert recipe_of(same) == recipe_of(before) and changed_settings(before, same) == []
    assert (
        config_hash(other) != golden["hash"] and settings_hash(other) != golden["settings"]
    )
    (change,) = changed_fields(recipe_of(before), recipe_of(other))
    assert change[0] == "spec.training.twoStageKl.stages[1].beta"
