"""Which fields of a run may change, and the wire format of the whole run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_common.contract import OPERATIONAL_SECTIONS
from evergrad_manifest import identity
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.identity import (
    RECIPE_SECTIONS,
    changed_settings,
    config_hash,
    from_wire,
    recipe_of,
    settings_hash,
    to_wire,
)
from evergrad_manifest.model.differences import ABSENT, changed_fields, problems_of_changes
from evergrad_manifest.model.fields import walk_fields
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.training import Training
from evergrad_manifest.validation import parse_object
from evergrad_manifest.values.numbers import with_whole_numbers

BASE = Path(__file__).parent / "base_manifest.yaml"


def run(*overrides: str) -> TrainingRun:
    return load_manifest(BASE, overrides=overrides).run


OPERATIONAL = [
    "metadata.name=other",
    "metadata.labels={a: b}",
    "spec.nodes.max=2",
    "spec.workersPerNode=2",
    "spec.resources={}",
    "spec.storage={claimName: mine}",
    "spec.template={labels: {a: b}}",
    "spec.preparation={resources: {requests: {cpu: 2}}, nodeSelector: {pool: cpu}}",
    "spec.suspend=true",
    "spec.image=example.org/trainer:2",
    "spec.imagePullPolicy=Always",
    "spec.restartNonce=again",
    "spec.activeDeadlineSeconds=60",
    "spec.ttlSecondsAfterFinished=60",
    "spec.ttlDeletes=Run",
    "spec.storage.path=elsewhere/first",
    "spec.failurePolicy.maxFailuresWithoutProgress=9",
    "spec.training.stop={afterStep: 3}",
    "spec.training.overrides=[{fromStep: 3, learningRate: 1e-4}, {fromStep: 9, clipNorm: 0}]",
    "spec.training.checkpoint.every.steps=7",
    "spec.training.evaluation.every.steps=7",
    "spec.training.initFrom={path: x}",
    (
        "spec.training.runtime={compile: on, parallelism: fsdp2, shards: 2, activationCheckpointing: true, "
        "threads: 3, device: cpu}"
    ),
    "spec.training.runtime.activationCheckpointing=offload",
    "spec.training.logging={every: {steps: 1}}",
    "spec.training.metrics={port: 0}",
    "spec.training.data.preparedDirectory=elsewhere",
]

RECIPE = [
    (
        "spec.training.model.config.hidden_size=512",
        "spec.training.model.config.hidden_size",
        256,
        512,
    ),
    (
        "spec.training.tokenizer={type: transformers, path: t}",
        "spec.training.tokenizer.type",
        "byte",
        "transformers",
    ),
    (
        "spec.training.data.sources[0].path=x",
        "spec.training.data.sources[0].path",
        "docs.jsonl",
        "x",
    ),
    (
        "spec.training.data.sources[0].weight=2",
        "spec.training.data.sources[0].weight",
        1.0,
        2.0,
    ),
    (
        "spec.training.data.sequenceLength=128",
        "spec.training.data.sequenceLength",
        256,
        128,
    ),
    ("spec.training.data.malformed=skip", "spec.training.data.malformed", "refuse", "skip"),
    (
        "spec.training.batching.microBatchSize=2",
        "spec.training.batching.microBatchSize",
        4,
        2,
    ),
    (
        "spec.training.optimizer.learningRate=2e-3",
        "spec.training.optimizer.learningRate",
        0.001,
        0.002,
    ),
    (
        "spec.training.optimizer.betas=[0.9, 0.99]",
        "spec.training.optimizer.betas[1]",
        0.95,
        0.99,
    ),
    ("spec.training.schedule.warmup=6%", "spec.training.schedule.warmup", 0.05, 0.06),
    ("spec.training.reproducibility.seed=1", "spec.training.reproducibility.seed", 0, 1),
    (
        "spec.training.reproducibility.dataSeed=0",
        "spec.training.reproducibility.dataSeed",
        ABSENT,
        0,
    ),
    ("spec.training.data.mixing=passes", "spec.training.data.mixing", "shares", "passes"),
    (
        "spec.training.reproducibility.elastic=exact",
        "spec.training.reproducibility.elastic",
        "fast",
        "exact",
    ),
    (
        "spec.training.runtime.precision=fp32",
        "spec.training.runtime.precision",
        "bf16-autocast",
        "fp32",
    ),
    (
        "spec.training.runtime.matmulPrecision=high",
        "spec.training.runtime.matmulPrecision",
        "highest",
        "high",
    ),
    (
        "spec.training.runtime.attention=math",
        "spec.training.runtime.attention",
        "auto",
        "math",
    ),
]


@pytest.mark.parametrize("override", OPERATIONAL)
def test_operational_settings_may_change(override: str) -> None:
    assert config_hash(run(override)) == config_hash(run())
    assert changed_fields(recipe_of(run()), recipe_of(run(override))) == []


@pytest.mark.acceptance("8d-4c", "8d-4d")
@pytest.mark.capability("G-65")
@pytest.mark.parametrize(("override", "path", "old", "new"), RECIPE)
def test_recipe_settings_change_the_hash_and_are_named_with_both_values(
    override: str, path: str, old: Any, new: Any
) -> None:
    assert config_hash(run(override)) != config_hash(run())
    assert (path, old, new) in changed_fields(recipe_of(run()), recipe_of(run(override)))


@pytest.mark.parametrize(("value", "mode"), [("true", "full"), ("false", "none")])
def test_activation_checkpointing_of_the_first_versions_keeps_its_meaning(
    value: str, mode: str
) -> None:
    one = run(f"spec.training.runtime.activationCheckpointing={value}")
    assert one.training.runtime.activation_checkpointing == mode
    assert one == run(f"spec.training.runtime.activationCheckpointing={mode}")


def test_an_extended_run_keeps_its_hash_and_the_horizon_is_named() -> None:
    longer = run("spec.training.horizon.tokens=40M")
    assert config_hash(longer) == config_hash(run())
    assert changed_fields(recipe_of(run()), recipe_of(longer)) == [
        ("spec.training.horizon.tokens", 20_000_000, 40_000_000)
    ]
    other = run("spec.training.horizon={steps: 10}")
    assert changed_fields(recipe_of(run()), recipe_of(other)) == [
        ("spec.training.horizon.tokens", 20_000_000, ABSENT),
        ("spec.training.horizon.steps", ABSENT, 10),
    ]


def test_spelling_does_not_change_the_hash() -> None:
    spelled = run(
        "spec.training.horizon.tokens=20_000k",
        "spec.training.optimizer.learningRate=0.1%",
        "spec.training.schedule.warmup=0.05",
    )
    assert spelled.spec.training == run().spec.training
    assert config_hash(spelled) == config_hash(run())


def test_the_hash_is_a_fixed_function_of_the_recipe() -> None:
    # A release that changes this number makes every run in existence refuse to resume.
    assert (
        config_hash(run())
        == "93d4973dbd209e0912e5b06f0d9659d66dfca1dd7eec42aedbc526d90de667cc"
    )
    assert config_hash(from_wire(json.loads(json.dumps(to_wire(run()))))) == config_hash(
        run()
    )


def test_a_different_number_of_sources_is_compared_as_a_whole() -> None:
    more = run("spec.training.data.sources[1]={name: more, path: more.jsonl}")
    (change,) = changed_fields(recipe_of(run()), recipe_of(more))
    assert change[0] == "spec.training.data.sources"
    assert [source["name"] for source in change[2]] == ["docs", "more"]


def test_a_refused_resume_names_each_field_with_both_values() -> None:
    changed = run(
        "spec.training.reproducibility.seed=1", "spec.training.optimizer.betas=[0.9, 0.99]"
    )
    problems = problems_of_changes(
        changed_fields(recipe_of(run()), recipe_of(changed)), directory="runs/docs-lm"
    )
    begin = "here, but the run in runs/docs-lm began with"
    why = "the recipe of a run does not change"
    remedy = "or give the changed run a name of its own."
    assert [str(problem) for problem in problems] == [
        f"spec.training.optimizer.betas[1]: 0.99 {begin} 0.95; {why}. Set it back to 0.95, {remedy}",
        f"spec.training.reproducibility.seed: 1 {begin} 0; {why}. Set it back to 0, {remedy}",
    ]


def test_a_recipe_that_lost_or_gained_a_field_reports_it() -> None:
    assert changed_fields({"a": 1, "b": None}, {"b": None, "c": 2}) == [
        ("spec.training.a", 1, ABSENT),
        ("spec.training.c", ABSENT, 2),
    ]
    assert "nothing here" in str(problems_of_changes([("x", 1, ABSENT)], directory="d")[0])


def test_a_null_in_the_model_configuration_is_a_named_change() -> None:
    changed = run(
        "spec.training.model.config={model_type: llama, hidden_size: 256, num_hidden_layers: 4, "
        "num_attention_heads: 4, x: null}"
    )
    assert config_hash(changed) != config_hash(run())
    assert changed_fields(recipe_of(run()), recipe_of(changed)) == [
        ("spec.training.model.config.x", ABSENT, None)
    ]


def test_every_training_section_is_either_recipe_or_operational() -> None:
    sections = {info.alias for info in Training.model_fields.values()}
    assert sections == {*RECIPE_SECTIONS, *OPERATIONAL_SECTIONS}
    assert not set(RECIPE_SECTIONS) & set(OPERATIONAL_SECTIONS)


WIRES = [
    (),
    ("spec.training.schedule={type: cosine, warmup: 100%}",),
    ("spec.training.schedule={type: constant}",),
    ("spec.training.schedule={warmup: 100%, decay: 0}",),
    (
        "spec.training.data.sources[0].type=tokens",
        "spec.training.data.sources[0].dtype=uint32",
    ),
    (
        "spec.training.model={path: model}",
        "spec.training.tokenizer={type: transformers, path: t}",
    ),
    ("spec.training.model.config.nothing={a: [1, null, 1.5, true, ü]}",),
    ("spec.training.runtime.compile=off", "spec.nodes=null", "spec.workersPerNode=null"),
    ("spec.template={volumes: [{name: a, emptyDir: {}}], env: [{name: A, value: '1'}]}",),
]


@pytest.mark.capability("G-2")
@pytest.mark.parametrize("overrides", WIRES)
def test_a_run_is_unchanged_by_the_wire_format_which_is_itself_a_manifest(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    original = run(*overrides)
    wire = json.loads(json.dumps(to_wire(original), allow_nan=False))
    assert from_wire(wire) == original
    as_json, as_yaml = tmp_path / "run.json", tmp_path / "run.yaml"
    as_json.write_text(json.dumps(wire))
    as_yaml.write_text(yaml.safe_dump(wire))
    assert load_manifest(as_json).run == original
    assert load_manifest(as_yaml).run == original
    assert to_wire(load_manifest(as_json).run) == to_wire(original)


def test_a_stored_run_without_a_later_field_gets_the_first_default_of_the_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As if these fields had been added later, with other defaults than today.
    first = {
        "training.checkpoint.keep": 7,
        "training.data.sources[].textField": "body",
        "training.data.heldOut.count": 9,
        "training.logging.every": {"steps": 1},
    }
    for path, value in first.items():
        monkeypatch.setitem(identity.FIRST_DEFAULTS, path, value)
    wire = to_wire(run("spec.training.data.heldOut=null", "spec.training.evaluation=null"))
    del wire["spec"]["training"]["checkpoint"], wire["spec"]["training"]["logging"]
    for source in wire["spec"]["training"]["data"]["sources"]:
        del source["textField"]
    stored = json.loads(json.dumps(wire))
    training = from_wire(stored).training
    assert (training.checkpoint.keep, training.logging.every.steps) == (7, 1)
    assert {source.text_field for source in training.data.sources} == {"body"}
    assert training.data.held_out is None and stored == wire

    # The values that it contains are valid.
    wire["spec"]["training"]["checkpoint"] = {"keep": 2}
    assert from_wire(wire).training.checkpoint.keep == 2


def test_a_modified_invalid_wire_object_is_refused() -> None:
    wire = to_wire(run())
    wire["spec"]["training"]["horizon"]["steps"] = 3
    with pytest.raises(ConfigurationError, match="steps and tokens are both set"):
        from_wire(wire)


@pytest.mark.parametrize(
    "change",
    ["spec.training.skipSteps=[4, 7]", "spec.training.onNonFinite={skip: 3, then: stop}"],
)
def test_skipping_a_bad_step_does_not_change_the_identity_of_a_run(change: str) -> None:
    assert config_hash(run(change)) == config_hash(run())
    assert recipe_of(run(change)) == recipe_of(run())
    assert from_wire(to_wire(run(change))) == run(change)


@pytest.mark.parametrize(
    "change",
    [
        "spec.training.horizon={steps: 9000}",
        "spec.training.stop.afterStep=5",
        "spec.training.overrides=[{fromStep: 3, learningRate: 1e-4}]",
        "spec.training.checkpoint.every.steps=7",
        "spec.training.evaluation.every.steps=7",
        "spec.training.runtime.parallelism=fsdp2",
    ],
)
def test_nodes_train_together_only_with_equal_settings(change: str) -> None:
    assert settings_hash(run(change)) != settings_hash(run())
    assert config_hash(run(change)) == config_hash(run())


@pytest.mark.parametrize(
    "change",
    [
        "metadata.labels={a: b}",
        "spec.nodes.max=2",
        "spec.training.runtime={threads: 3, device: cpu, collectiveTimeoutSeconds: 5}",
        "spec.training.skipSteps=[3]",
        "spec.training.logging.every.steps=1",
        "spec.training.metrics.port=0",
        "spec.training.data.preparedDirectory=elsewhere",
    ],
)
def test_settings_of_one_machine_may_differ_between_nodes(change: str) -> None:
    assert settings_hash(run(change)) == settings_hash(run())


def test_changes_of_a_training_run_are_named_with_both_values() -> None:
    changes = changed_settings(
        run(),
        run(
            "spec.training.checkpoint.keep=9",
            "spec.training.overrides=[{fromStep: 3, clipNorm: 2}]",
        ),
    )
    assert changes == [
        ("spec.training.overrides", [], [{"fromStep": 3, "clipNorm": 2.0}]),
        ("spec.training.checkpoint.keep", 3, 9),
    ]


def test_a_changed_file_of_a_carried_task_is_named_by_hashes_and_not_quoted() -> None:
    runs = []
    for text in ("ONE = 1\n" * 10_000, "ONE = 2\n" * 10_000):
        raw = yaml.safe_load(BASE.read_text())
        raw["spec"]["training"] |= {
            "recipe": "mine:Task",
            "files": {"mine.py": text, "losses.py": ""},
        }
        runs.append(TrainingRun.model_validate(raw))
    ((path, old, new),) = changed_settings(*runs)
    assert path == "spec.training.files.mine.py"
    assert old != new and all(
        re.fullmatch(r"sha256:[0-9a-f]{16}", value) for value in (old, new)
    )


def test_evaluation_pods_are_no_part_of_the_recipe_but_of_the_shared_settings() -> None:
    without = run("spec.training.evaluation.every=null")
    first = run("spec.training.evaluation.every=null", "spec.evaluation={}")
    second = run(
        "spec.training.evaluation.every=null",
        "spec.evaluation={resources: {requests: {cpu: 2}}, keepWaiting: 8}",
    )
    assert config_hash(without) == config_hash(first) == config_hash(second)
    assert settings_hash(first) == settings_hash(second) != settings_hash(without)
    assert changed_settings(first, second) == [("spec.evaluation.keepWaiting", 4, 8)]
    # A default that is written out changes nothing; the other value does.
    named = "spec.training.evaluation.sets=[{name: heldOut, samples: 3, whileTraining: "
    for pods, default, other in (
        ((), "true", "false"),
        (("spec.evaluation={}",), "false", "true"),
    ):
        given = ("spec.training.evaluation.every=null", *pods)
        bare = run(*given, "spec.training.evaluation.sets=[{name: heldOut, samples: 3}]")
        assert settings_hash(run(*given, f"{named}{default}}}]")) == settings_hash(bare)
        assert settings_hash(run(*given, f"{named}{other}}}]")) != settings_hash(bare)


# As an API server returns them: Go writes a whole float without a fraction up to 1e21, by its shortest decimal.
STORED = [
    (10000.0, 10000),
    (-0.0, 0),
    (1e6, 1000000),
    (1e-5, 1e-5),
    (0.5, 0.5),
    (2.0**60, 1152921504606847000),
    (1e20, 100000000000000000000),
    (1e21, 1e21),
    (2**63 - 1, 2**63 - 1),
    (-(2**63), -(2**63)),
    (2**63, 9223372036854776000),
    (2**64 + 1, 18446744073709552000),
    (123456789012345678901234, 1.2345678901234568e23),
    (True, True),
]


@pytest.mark.parametrize(("written", "stored"), STORED)
def test_a_number_in_a_free_mapping_has_the_form_that_an_api_server_gives_it(
    written: float, stored: float
) -> None:
    found = with_whole_numbers({"a": [written]})["a"][0]
    assert (found, type(found)) == (stored, type(stored))
    again = with_whole_numbers(found)
    assert (again, type(again)) == (stored, type(stored))


def object_of(config: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(BASE.read_text())
    training = raw["spec"]["training"]
    training["model"] = {"config": {"model_type": "llama", **config}}
    training |= {"recipe": "mine:Task", "options": options}
    return raw


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 10000.0},
        {"attention_dropout": 0.0},
        {"rope_parameters": {"factor": 8.0, "short_factor": [1.0, 1.5]}},
        {"hidden_size": 64.0},
        {"large": 2.0**70},
    ],
    ids=str,
)
def test_a_manifest_has_the_same_identity_on_a_laptop_and_on_a_cluster(
    config: dict[str, Any],
) -> None:
    local = object_of(config, {"rate": 1.0, "nested": [{"deep": 3.0}]})
    stored = json.loads(json.dumps(with_whole_numbers(local)))
    one, other = parse_object(local), parse_object(stored)
    assert config_hash(one) == config_hash(other)
    assert settings_hash(one) == settings_hash(other)
    assert changed_fields(recipe_of(one), recipe_of(other)) == []
    assert to_wire(one) == to_wire(other)


def test_the_hash_of_a_recipe_in_a_checkpoint_ignores_the_form_of_free_numbers() -> None:
    run_ = parse_object(object_of({"rope_theta": 10000.0}, {"rate": 1.0}))
    old = identity.hashed_recipe(run_)
    old["model"]["config"]["rope_theta"], old["options"]["rate"] = 10000.0, 1.0
    assert identity.hash_recipe(old) == config_hash(run_)
    # Typed numbers are hashed as they always were.
    old["optimizer"]["clipNorm"] = 1
    assert identity.hash_recipe(old) != config_hash(run_)


def test_each_free_mapping_of_the_recipe_is_hashed_in_one_form() -> None:
    found = {
        field.path.removeprefix("spec.training.")
        for field in walk_fields(TrainingRun)
        if field.path.startswith("spec.training.")
        and "typing.Any" in str(field.info.annotation)
    }
    named = {
        f"{section}.{key}"
        for section, keys in identity.FREE_MAPPINGS.items()
        for key in keys
    } | {section for section, keys in identity.FREE_MAPPINGS.items() if not keys}
    assert found == named
