"""The operator's dataclasses, and the contract that holds them together with the trainer's model."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_manifest import envelope as model
from evergrad_manifest import script as script_model
from evergrad_manifest import training as training_model
from evergrad_manifest.fields import fields_of, walk_fields
from evergrad_manifest.identity import to_wire
from evergrad_manifest.reading.loader import load_manifest
from evergrad_manifest.reading.validation import parse_run as parse_trainer_run
from evergrad_operator.errors import OperatorError, SpecError
from evergrad_operator.spec import (
    FailurePolicy,
    Metrics,
    Nodes,
    Resources,
    RunSpec,
    Script,
    Storage,
    Template,
    TrainingRun,
    parse_run,
)

BASE = Path(__file__).parent.parent / "config" / "base_manifest.yaml"

MINIMAL: dict[str, Any] = {
    "apiVersion": "evergrad.dev/v1alpha1",
    "kind": "TrainingRun",
    "metadata": {"name": "docs-lm"},
    "spec": {"training": yaml.safe_load(BASE.read_text())["spec"]["training"]},
}

FULL_SCRIPT: dict[str, Any] = {
    "command": ["train.py", "--epochs", "3"],
    "env": {"A": "1"},
    "workingDirectory": "/code",
    "gracePeriodSeconds": "1k",
    "metrics": {"port": "9.1k", "lingerSeconds": 5},
}

FULL_TEMPLATE: dict[str, Any] = {
    "labels": {"team": "research"},
    "annotations": {"note": "x"},
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "volumes": [{"name": "cache", "emptyDir": {}}],
    "volumeMounts": [{"name": "cache", "mountPath": "/cache"}],
    "env": [{"name": "A", "value": "1"}],
    "priorityClassName": "high",
    "runtimeClassName": "nvidia",
    "schedulerName": "volcano",
    "imagePullSecrets": [{"name": "registry"}],
    "terminationGracePeriodSeconds": 120,
}


def test_the_example_is_read_into_values() -> None:
    run = parse_run(yaml.safe_load(BASE.read_text()))
    assert (run.name, run.namespace, run.uid, run.generation) == ("docs-lm", "default", "", 0)
    assert run.spec.nodes == Nodes(min=2, max=4)
    assert run.spec.workers_per_node == 1
    assert run.spec.resources == Resources(requests={"cpu": "2"}, limits={"memory": "4Gi"})
    assert run.spec.storage == Storage(
        size="20Gi", storage_class_name="shared", access_modes=(), claim_name=None, path=None
    )
    assert run.spec.suspend is False
    assert run.spec.failure_policy == FailurePolicy(max_failures_without_progress=3)
    assert run.spec.training is not None and run.spec.training["recipe"] == "pretrain"
    assert run.spec.script is None


def of_script(**script: Any) -> dict[str, Any]:
    return {**MINIMAL, "spec": {"script": script}}


def test_a_script_is_read_into_values() -> None:
    spec = parse_run(of_script(**FULL_SCRIPT)).spec
    assert spec.training is None
    assert spec.script == Script(
        command=("train.py", "--epochs", "3"),
        env={"A": "1"},
        working_directory="/code",
        grace_period_seconds=1000,
        metrics=Metrics(port=9100, linger_seconds=5),
    )


def test_a_script_of_a_command_alone_has_defaults() -> None:
    assert parse_run(of_script(command=["x"])).spec.script == Script(("x",), {}, ".", 30, Metrics(None, 0))


def test_what_the_api_server_adds_is_read_too() -> None:
    raw = {
        **MINIMAL,
        "metadata": {"name": "a", "namespace": "team", "uid": "u", "generation": 4, "managedFields": [{}]},
        "status": {},
    }
    run = parse_run(raw)
    assert (run.namespace, run.uid, run.generation) == ("team", "u", 4)
    assert (run.created_at, run.is_deleting) == (0.0, False)
    times = {"creationTimestamp": "1970-01-01T00:01:00Z", "deletionTimestamp": "1970-01-01T00:02:00Z"}
    run = parse_run({**MINIMAL, "metadata": {"name": "a", **times}})
    assert (run.created_at, run.is_deleting) == (60.0, True)


@pytest.mark.parametrize(
    ("storage", "claim", "path"),
    [
        ({}, "docs-lm", "docs-lm"),
        ({"claimName": "shared"}, "shared", "docs-lm"),
        ({"claimName": "shared", "path": "runs//first/./"}, "shared", "runs/first"),
    ],
)
def test_a_run_has_a_folder_of_its_own_in_its_volume(storage: dict[str, Any], claim: str, path: str) -> None:
    run = parse_run({**MINIMAL, "spec": {**MINIMAL["spec"], "storage": storage}})
    assert (run.claim_name, run.volume_path) == (claim, path)


def test_only_replicated_state_outlives_a_change_of_the_group() -> None:
    assert parse_run(MINIMAL).recovery == "in-process"
    assert parse_run(of_script(command=["x"])).recovery == "fresh"
    sharded = {**MINIMAL["spec"]["training"], "runtime": {"parallelism": "fsdp2"}}
    assert parse_run({**MINIMAL, "spec": {"training": sharded}}).recovery == "fresh"


def test_a_template_keeps_kubernetes_spelling_inside() -> None:
    template = parse_run({**MINIMAL, "spec": {**MINIMAL["spec"], "template": FULL_TEMPLATE}}).spec.template
    assert template.node_selector == {"zone": "a"}
    assert template.topology_spread_constraints[0]["whenUnsatisfiable"] == "DoNotSchedule"
    assert template.priority_class_name == "high"


def test_values_are_frozen() -> None:
    run = parse_run(MINIMAL)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.spec.nodes.min = 7  # type: ignore[misc]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("metadata", {}, "metadata.name: is missing. Install the CRD that belongs to this operator"),
        ("metadata", {"name": 3}, "metadata.name: is not a text"),
        ("metadata", {"name": "a", "labels": {"x": 1}}, "metadata.labels.x: is not a text"),
        ("spec", {}, "spec: has neither training nor script"),
        ("spec", {"training": {}, "script": {"command": ["a"]}}, "spec: has both training and script"),
        ("spec", {"script": {}}, "spec.script.command: is not a list of texts"),
        ("spec", {"script": {"command": []}}, "spec.script.command: is not a list of texts"),
        ("spec", {"script": {"command": "train.py"}}, "spec.script.command: is not a list of texts"),
        ("spec", {"script": {"command": ["a", 3]}}, "spec.script.command: is not a list of texts"),
        ("spec", {"script": {"command": ["a"], "env": {"A": 1}}}, "spec.script.env.A: is not a text"),
        (
            "spec",
            {"script": {"command": ["a"], "gracePeriodSeconds": "soon"}},
            "spec.script.gracePeriodSeconds: is not a whole",
        ),
        ("spec", [], "spec: is not a mapping"),
        ("spec.training", [], "spec.training: is not a mapping"),
        ("spec.nodes", [1], "spec.nodes: is not a mapping"),
        ("spec.nodes", {"min": "many"}, "spec.nodes.min: is not a whole number"),
        ("spec.nodes", {"min": 1.5}, "spec.nodes.min: is not a whole number"),
        ("spec.nodes", {"min": True}, "spec.nodes.min: is not a whole number"),
        ("spec.nodes", {"min": "9" * 10**6}, "spec.nodes.min: is not a whole number"),
        ("spec.nodes", {"min": "1e999999999"}, "spec.nodes.min: is not a whole number"),
        ("spec.nodes", {"min": "nan"}, "spec.nodes.min: is not a whole number"),
        ("spec.suspend", "yes", "spec.suspend: is neither true nor false"),
        ("spec.resources", {"limits": {"cpu": True}}, "spec.resources.limits.cpu: is not a quantity"),
        ("spec.storage", {"claimName": 3}, "spec.storage.claimName: is not a text"),
        ("spec.template", {"volumes": {}}, "spec.template.volumes: is not a list of mappings"),
        ("spec.template", {"env": ["A"]}, "spec.template.env: is not a list of mappings"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_an_object_without_its_shape_is_refused_with_its_path(path: str, value: Any, said: str) -> None:
    raw = json.loads(json.dumps(MINIMAL))
    node = raw
    *parents, last = path.split(".")
    for part in parents:
        node = node[part]
    node[last] = value
    with pytest.raises(SpecError, match=r".") as refused:
        parse_run(raw)
    assert isinstance(refused.value, OperatorError)
    assert said in str(refused.value)
    assert refused.value.path == said.partition(":")[0]


# The contract with the trainer's model.


class Recording(Mapping[str, Any]):
    """A mapping that notes which of its keys were asked for."""

    def __init__(self, value: Mapping[str, Any], path: str, asked: set[str]) -> None:
        self._value, self._path, self._asked = value, path, asked

    def __getitem__(self, key: str) -> Any:
        self._asked.add(f"{self._path}{key}")
        value = self._value[key]
        return Recording(value, f"{self._path}{key}.", self._asked) if isinstance(value, dict) else value

    def __iter__(self) -> Iterator[str]:
        return iter(self._value)

    def __len__(self) -> int:
        return len(self._value)


def asked_for() -> set[str]:
    """Every path the operator asks for, of a typed run or of a script."""
    asked: set[str] = set()
    for run in (load_manifest(BASE).run, parse_trainer_run(of_script(**FULL_SCRIPT))):
        parse_run(Recording(to_wire(run), "", asked))
    return asked


def test_every_field_of_the_envelope_is_read() -> None:
    asked = asked_for()
    envelope = {
        field.path for field in walk_fields(model.TrainingRun) if not field.path.startswith("spec.training.")
    }
    assert envelope - asked == {"apiVersion", "kind"}


def test_nothing_is_read_that_the_model_does_not_have() -> None:
    known = {field.path for field in walk_fields(model.TrainingRun)}
    entries = (
        *("metadata.labels.", "metadata.annotations.", "spec.resources.requests.", "spec.resources.limits."),
        "spec.script.env.",
    )
    assert {path for path in asked_for() if not path.startswith(entries)} - known == {
        *("metadata.uid", "metadata.generation", "metadata.creationTimestamp", "metadata.deletionTimestamp")
    }


def test_defaults_are_the_same_on_both_sides() -> None:
    resolved = to_wire(parse_trainer_run(MINIMAL))
    assert _without_training(parse_run(MINIMAL)) == _without_training(parse_run(resolved))


@pytest.mark.parametrize(
    "script",
    [
        {"command": ["a"]},
        FULL_SCRIPT,
        {"command": ["-m", "a"], "env": None, "metrics": None, "gracePeriodSeconds": None},
    ],
    ids=["command alone", "all", "nulls"],
)
def test_both_sides_read_the_same_script(script: dict[str, Any]) -> None:
    assert parse_run(of_script(**script)) == parse_run(to_wire(parse_trainer_run(of_script(**script))))


def _without_training(run: TrainingRun) -> TrainingRun:
    return dataclasses.replace(run, spec=dataclasses.replace(run.spec, training={}))


@pytest.mark.parametrize(
    ("section", "counterpart"),
    [
        (model.Nodes, Nodes),
        (model.Resources, Resources),
        (model.Storage, Storage),
        (model.Template, Template),
        (model.FailurePolicy, FailurePolicy),
        (script_model.Script, Script),
        (training_model.Metrics, Metrics),
        (model.Spec, RunSpec),
    ],
)
def test_each_section_has_the_same_fields_in_the_same_order(
    section: type[model.Section], counterpart: type[Any]
) -> None:
    assert list(section.model_fields) == [field.name for field in dataclasses.fields(counterpart)]


def test_every_section_of_the_envelope_has_a_counterpart() -> None:
    assert set(fields_of(model.Spec)) == {
        *("nodes", "workersPerNode", "resources", "storage", "template", "suspend", "failurePolicy"),
        *("image", "imagePullPolicy", "restartNonce", "activeDeadlineSeconds", "ttlSecondsAfterFinished"),
        *("training", "script"),
    }


@pytest.mark.parametrize(
    "spec",
    [
        {"nodes": {"min": "2", "max": "1k"}},
        {"nodes": {"min": 3}},
        {"nodes": {"min": 2.0, "max": "1_0"}},
        {"nodes": {"min": "1e1", "max": "1.2e1"}},
        {
            "nodes": None,
            "template": None,
            "storage": None,
            "resources": None,
            "suspend": None,
            "workersPerNode": None,
        },
        {"workersPerNode": " 2 "},
        {"failurePolicy": {"maxFailuresWithoutProgress": "0.1k"}},
        {
            "resources": {
                "requests": {"cpu": "0.5"},
                "limits": {"cpu": 2, "memory": "1e9", "nvidia.com/gpu": 1},
            }
        },
        {"storage": {"size": 10**9}},
        {"storage": {"claimName": "mine"}},
        {"storage": {"claimName": "mine", "path": "runs/first"}},
        {"image": "registry.example/trainer:1", "imagePullPolicy": "Always", "restartNonce": "again"},
        {"activeDeadlineSeconds": "1k", "ttlSecondsAfterFinished": 0},
        {"suspend": True},
        {"template": FULL_TEMPLATE},
    ],
    ids=lambda spec: json.dumps(spec)[:40],
)
def test_both_sides_read_the_same_values_however_they_are_written(spec: dict[str, Any]) -> None:
    training = json.loads(json.dumps(MINIMAL["spec"]["training"]))
    training["batching"] = {"globalBatchSize": 2**20, "microBatchSize": 1}  # room for any number of nodes
    raw = {**MINIMAL, "spec": {**spec, "training": training}}
    resolved = to_wire(parse_trainer_run(raw))
    assert _without_training(parse_run(raw)) == _without_training(parse_run(resolved))


def test_the_operator_does_not_import_the_trainer() -> None:
    import evergrad_operator.spec as module

    assert "evergrad_trainer" not in Path(module.__file__).read_text()
