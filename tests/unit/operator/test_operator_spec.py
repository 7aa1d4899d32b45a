"""How the operator reads a run: the manifest models, and the fields that Kubernetes adds."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml

from evergrad_manifest import envelope
from evergrad_manifest.reading.validation import check_run
from evergrad_operator.core.objects.errors import OperatorError, SpecError
from evergrad_operator.core.observe import spec as module
from evergrad_operator.core.observe.spec import SpecCache, parse_run

BASE = Path(__file__).parent.parent / "manifest" / "base_manifest.yaml"
FILE: dict[str, Any] = yaml.safe_load(BASE.read_text())
TRAINING: dict[str, Any] = FILE["spec"]["training"]


def stored(spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    """The file as the API server stores it. ``spec`` replaces parts of its spec."""
    added = {
        "namespace": "team",
        "uid": "u",
        "generation": 4,
        "managedFields": [{}],
        **metadata,
    }
    return {
        **FILE,
        "metadata": {**FILE["metadata"], **added},
        "spec": {**FILE["spec"], **(spec or {})},
        "status": {"phase": "Pending"},
    }


def test_the_example_is_parsed_into_the_manifest_models() -> None:
    run = parse_run(FILE)
    assert (run.name, run.namespace, run.uid, run.generation) == (
        "docs-lm",
        "default",
        "",
        0,
    )
    expected = check_run(FILE)[0]
    assert expected is not None
    assert run.spec == expected.spec.model_copy(update={"training": None})
    assert (run.parsed.is_typed, run.parsed.is_whole, run.parsed.problems) == (
        True,
        True,
        (),
    )


def test_fields_that_the_api_server_adds_are_parsed_without_problems() -> None:
    times = {
        "creationTimestamp": "1970-01-01T00:01:00Z",
        "deletionTimestamp": "1970-01-01T00:02:00Z",
    }
    run = parse_run(stored(**times, labels={"a": "b"}, annotations={"c": "d"}))
    assert (run.namespace, run.uid, run.generation) == ("team", "u", 4)
    assert (run.created_at, run.is_deleting) == (60.0, True)
    assert (run.labels, run.annotations) == ({"a": "b"}, {"c": "d"})
    assert run.parsed.problems == ()


@pytest.mark.parametrize(
    ("storage", "claim", "path"),
    [
        ({}, "docs-lm", "docs-lm"),
        ({"claimName": "shared"}, "shared", "docs-lm"),
        ({"claimName": "shared", "path": "runs/first"}, "shared", "runs/first"),
    ],
)
def test_a_run_has_its_own_folder_in_its_volume(
    storage: dict[str, Any], claim: str, path: str
) -> None:
    run = parse_run(stored({"storage": storage}))
    assert (run.claim_name, run.volume_path) == (claim, path)


def test_only_replicated_state_survives_a_change_of_the_group() -> None:
    assert parse_run(FILE).parsed.recovery == "in-process"
    assert (
        parse_run(stored({"training": None, "script": {"command": ["x"]}})).parsed.recovery
        == "fresh"
    )
    sharded = {**TRAINING, "runtime": {"parallelism": "fsdp2"}}
    assert parse_run(stored({"training": sharded})).parsed.recovery == "fresh"


@pytest.mark.parametrize(
    ("given", "port"), [({}, None), ({"port": 0}, 0), ({"port": "9.1k"}, 9100)]
)
def test_the_metrics_port_is_set_by_the_run_or_unset(
    given: dict[str, Any], port: int | None
) -> None:
    assert (
        parse_run(stored({"training": {**TRAINING, "metrics": given}})).parsed.metrics_port
        == port
    )
    script = {"command": ["x"], "metrics": given}
    assert (
        parse_run(stored({"training": None, "script": script})).parsed.metrics_port == port
    )


def test_every_problem_that_validate_finds_is_found_before_the_first_pod() -> None:
    wrong = stored(
        {
            "nodes": {"min": 4, "max": 2},
            "training": {**TRAINING, "schedule": {"type": "wsd", "warmup": "150%"}},
        }
    )
    run = parse_run(wrong)
    _, expected = check_run({**FILE, "spec": wrong["spec"]})
    assert [problem.path for problem in expected] == [
        "spec.training.schedule.warmup",
        "spec.nodes.max",
    ]
    assert run.parsed.problems == run.find_obstacles(has_begun=False) == tuple(expected)


def test_a_valid_envelope_is_parsed_although_the_recipe_is_invalid() -> None:
    run = parse_run(stored({"suspend": True, "training": {"recipe": "cooking"}}))
    assert (run.spec.suspend, run.parsed.is_typed, run.parsed.is_whole) == (
        True,
        True,
        False,
    )
    assert run.find_obstacles(has_begun=True) == run.parsed.problems != ()


def test_an_invalid_envelope_is_refused_with_all_problems() -> None:
    with pytest.raises(SpecError) as refused:
        parse_run(stored({"nodes": {"min": "many"}, "suspend": "yes"}))
    assert isinstance(refused.value, OperatorError)
    assert [problem.path for problem in refused.value.problems] == [
        "spec.nodes.min",
        "spec.suspend",
    ]
    assert "spec.nodes.min: " in str(refused.value) and "spec.suspend: " in str(
        refused.value
    )


def test_a_recipe_rule_of_a_later_version_does_not_apply_to_a_run_that_has_started() -> (
    None
):
    wide = {**TRAINING, "schedule": {"type": "cosine", "warmup": "60%", "decay": "60%"}}
    run = parse_run(stored({"training": wide, "nodes": {"min": 2, "max": 1}}))
    assert {problem.path.split(".")[1] for problem in run.parsed.problems} == {
        "training",
        "nodes",
    }
    assert [problem.path for problem in run.find_obstacles(has_begun=True)] == [
        "spec.nodes.max"
    ]


def test_a_folder_outside_the_volume_is_an_obstacle_at_any_time() -> None:
    run = parse_run(stored({"storage": {"path": "../other"}}))
    assert [problem.path for problem in run.find_obstacles(has_begun=True)] == [
        "spec.storage.path"
    ]


def test_a_run_with_quoted_numbers_of_an_earlier_version_continues() -> None:
    old = stored({"nodes": {"min": "2", "max": "3"}, "workersPerNode": "2"})
    run = parse_run(old)
    assert (run.spec.nodes.min, run.spec.nodes.max, run.spec.workers_per_node) == (2, 3, 2)
    assert run.parsed.is_whole and run.find_obstacles(has_begun=True) == ()
    assert [problem.path for problem in run.parsed.outdated] == [
        "spec.nodes.min",
        "spec.nodes.max",
        "spec.workersPerNode",
    ]
    # Its nodes, which may have this version, read plain numbers.
    assert run.raw["spec"]["nodes"] == {"min": 2, "max": 3}
    new = parse_run(stored({"nodes": {"min": 2, "max": 3}, "workersPerNode": 2}))
    assert run.parsed == dataclasses.replace(new.parsed, outdated=run.parsed.outdated)


def test_a_run_that_lenient_parsing_cannot_read_has_the_problems_that_validate_finds() -> (
    None
):
    quoted = {"nodes": {"min": "2"}, "training": {**TRAINING, "recipe": "5"}}
    _, expected = check_run({**FILE, "spec": {**FILE["spec"], **quoted}})
    parsed = parse_run(stored({"suspend": True, **quoted})).parsed
    assert {one.path for one in expected} == {"spec.nodes.min", "spec.training.recipe"}
    assert (parsed.problems, parsed.outdated) == (tuple(expected), ())
    # It can still be explained, suspended and deleted.
    assert parsed.spec.suspend and not parsed.is_whole

    # A quantity with blanks was never valid, although it looks like a number.
    blank = {"resources": {"requests": {"cpu": " 7 "}}}
    _, expected = check_run({**FILE, "spec": {**FILE["spec"], **blank}})
    with pytest.raises(SpecError) as refused:
        parse_run(stored(blank))
    assert refused.value.problems == tuple(expected) != ()


def test_values_are_frozen() -> None:
    run = parse_run(FILE)
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.name = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        run.spec.nodes.min = 7


# ---- once for each generation ------------------------------------------------------------------------------


def test_a_spec_is_parsed_once_for_each_generation_of_each_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []
    original = module.parse_spec

    def parse_spec(raw: Any, *rest: Any) -> Any:
        parsed.append(f"{raw['metadata']['uid']}/{raw['metadata']['generation']}")
        return original(raw, *rest)

    monkeypatch.setattr(module, "parse_spec", parse_spec)
    cache = SpecCache()
    for raw in (
        stored(),
        stored(labels={"a": "b"}),
        stored({"suspend": True}, generation=5),
        stored(uid="v"),
    ):
        cache.parse(raw)
    assert parsed == ["u/4", "u/5", "v/4"]
    assert cache.parse(stored(uid="v", labels={"a": "b"})).labels == {"a": "b"}, (
        "metadata are not cached"
    )
    cache.forget(("team", "docs-lm"))
    cache.parse(stored(uid="v"))
    assert parsed[3:] == ["v/4"]


def test_a_refused_spec_is_parsed_again() -> None:
    cache = SpecCache()
    for _ in range(2):
        with pytest.raises(SpecError):
            cache.parse(stored({"nodes": []}))


def test_the_operator_defines_no_manifest_models() -> None:
    assert module.Spec is envelope.Spec
    assert "evergrad_trainer" not in Path(module.__file__).read_text()
