"""Profiles: their allowed content, which value takes precedence, and the output of
``evergrad validate --profile``."""

import argparse
import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from evergrad_cli.local import validate
from evergrad_manifest.identity import config_hash
from evergrad_manifest.profile import (
    apply_defaults,
    check_allowed,
    check_profile,
    merge_defaults,
)
from evergrad_manifest.reading.validation import parse_run

BASE = Path(__file__).parent / "base_manifest.yaml"
PAGE = Path(__file__).resolve().parents[3] / "docs/operate/profiles.md"
SPEC = yaml.safe_load(BASE.read_text())["spec"]
QUEUE = "kueue.x-k8s.io/queue-name"
GPU = {"key": "gpu", "operator": "Exists"}
SPOT = {"key": "spot", "operator": "Exists"}


def run(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "evergrad.dev/v1alpha1",
        "kind": "TrainingRun",
        "metadata": {"name": "r"},
        "spec": {"training": SPEC["training"], **spec},
    }


def spec_of(document: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = apply_defaults(document, defaults)["spec"]
    return merged


PRECEDENCE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "one value": ({"image": "a/b:1"}, {"image": "c/d:2"}, {"image": "c/d:2"}),
    "a null is no value": ({"image": "a/b:1"}, {"image": None}, {"image": "a/b:1"}),
    "a zero is a value": (
        {"ttlSecondsAfterFinished": 9},
        {"ttlSecondsAfterFinished": 0},
        {"ttlSecondsAfterFinished": 0},
    ),
    "mappings by key": (
        {"template": {"labels": {"a": "1", "b": "1"}, "nodeSelector": {"x": "1"}}},
        {"template": {"labels": {"b": "2"}}},
        {"template": {"labels": {"a": "1", "b": "2"}, "nodeSelector": {"x": "1"}}},
    ),
    "a resource as request and limit at once": (
        {
            "resources": {
                "requests": {"cpu": "1", "memory": "1Gi"},
                "limits": {"memory": "2Gi"},
            }
        },
        {"resources": {"requests": {"memory": "8Gi"}}},
        {"resources": {"requests": {"cpu": "1", "memory": "8Gi"}, "limits": {}}},
    ),
    "variables by name, the profile's first": (
        {"template": {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "1"}]}},
        {"template": {"env": [{"name": "A", "value": "2"}]}},
        {"template": {"env": [{"name": "B", "value": "1"}, {"name": "A", "value": "2"}]}},
    ),
    "mounts by path": (
        {"template": {"volumeMounts": [{"name": "x", "mountPath": "/d"}]}},
        {"template": {"volumeMounts": [{"name": "y", "mountPath": "/d"}]}},
        {"template": {"volumeMounts": [{"name": "y", "mountPath": "/d"}]}},
    ),
    "tolerations appended, equal ones once": (
        {"template": {"tolerations": [GPU]}},
        {"template": {"tolerations": [SPOT, GPU]}},
        {"template": {"tolerations": [GPU, SPOT]}},
    ),
    "kinds of affinity by key": (
        {"template": {"affinity": {"nodeAffinity": {"a": 1}, "podAffinity": {"b": 1}}}},
        {"template": {"affinity": {"nodeAffinity": {"c": 1}}}},
        {"template": {"affinity": {"nodeAffinity": {"c": 1}, "podAffinity": {"b": 1}}}},
    ),
    "access modes as a whole": (
        {"storage": {"size": "9Gi", "accessModes": ["ReadWriteMany"]}},
        {"storage": {"accessModes": ["ReadWriteOnce"]}},
        {"storage": {"size": "9Gi", "accessModes": ["ReadWriteOnce"]}},
    ),
    "an existing volume is the run's alone": (
        {"storage": {"size": "9Gi", "storageClassName": "fast"}},
        {"storage": {"claimName": "mine"}},
        {"storage": {"claimName": "mine"}},
    ),
    "a pod beside the nodes is not asked for": (
        {"preparation": {"resources": {"requests": {"cpu": "1"}}}},
        {},
        {},
    ),
    "a pod beside the nodes that is asked for": (
        {"preparation": {"resources": {"requests": {"cpu": "1"}}}},
        {"preparation": {}},
        {"preparation": {"resources": {"requests": {"cpu": "1"}}}},
    ),
}


@pytest.mark.parametrize("name", list(PRECEDENCE))
def test_each_kind_of_value_is_merged_as_the_page_documents(name: str) -> None:
    defaults, own, merged = PRECEDENCE[name]
    assert spec_of(run(**own), defaults) == {"training": SPEC["training"], **merged}


def test_the_namespace_overrides_the_installation() -> None:
    below = {"queueName": "all", "image": "a/b:1", "template": {"tolerations": [GPU]}}
    above = {"queueName": "team", "template": {"tolerations": [SPOT]}}
    assert merge_defaults(below, above) == {
        "queueName": "team",
        "image": "a/b:1",
        "template": {"tolerations": [GPU, SPOT]},
    }


def test_a_queue_becomes_a_label_of_a_run_without_one() -> None:
    assert apply_defaults(run(), {"queueName": "q"})["metadata"]["labels"] == {QUEUE: "q"}
    named = {**run(), "metadata": {"name": "r", "labels": {QUEUE: "mine", "a": "b"}}}
    assert apply_defaults(named, {"queueName": "q"})["metadata"] == named["metadata"]


@pytest.mark.parametrize("spec", [None, "text", {"resources": "x", "template": [1]}])
def test_a_run_that_cannot_be_parsed_is_left_to_its_own_validation(spec: Any) -> None:
    document = {**run(), "spec": spec}
    defaults = {"resources": {"requests": {"cpu": "1"}}, "template": {"tolerations": [GPU]}}
    assert apply_defaults(document, defaults)["spec"] == spec


_TEXTS = st.sampled_from(["a", "b", "c"])
_MAPS = st.dictionaries(_TEXTS, _TEXTS, max_size=3)
_AMOUNTS = st.dictionaries(
    st.sampled_from(["cpu", "memory", "example.com/x"]), st.sampled_from(["1Gi", "2Gi"])
)
_ENV = st.lists(
    st.builds(lambda name, value: {"name": name, "value": value}, _TEXTS, _TEXTS),
    max_size=3,
    unique_by=lambda item: item["name"],
)
_SPECS = st.fixed_dictionaries(
    {},
    optional={
        "image": _TEXTS,
        "ttlSecondsAfterFinished": st.integers(0, 3),
        "resources": st.fixed_dictionaries(
            {}, optional={"requests": _AMOUNTS, "limits": _AMOUNTS}
        ),
        "storage": st.fixed_dictionaries({}, optional={"size": st.just("1Gi")}),
        "template": st.fixed_dictionaries(
            {},
            optional={
                "labels": _MAPS,
                "nodeSelector": _MAPS,
                "env": _ENV,
                "tolerations": st.lists(st.sampled_from([GPU, SPOT]), max_size=2),
                "priorityClassName": _TEXTS,
            },
        ),
    },
)


def _contains(merged: Any, own: Any) -> bool:
    """Return whether ``merged`` has each value of ``own`` at the same place; a list's items may be anywhere
    in the list."""
    if isinstance(own, dict):
        return all(key in merged and _contains(merged[key], own[key]) for key in own)
    if isinstance(own, list):
        return all(item in merged for item in own)
    return bool(merged == own)


@given(defaults=_SPECS, own=_SPECS)
def test_the_value_of_the_run_always_wins_and_a_second_merge_changes_nothing(
    defaults: dict[str, Any], own: dict[str, Any]
) -> None:
    before = copy.deepcopy((defaults, own))
    merged = apply_defaults(run(**own), defaults)
    assert _contains(merged["spec"], own)
    assert apply_defaults(merged, defaults) == merged
    assert (defaults, own) == before
    names = [one["name"] for one in merged["spec"].get("template", {}).get("env", ())]
    assert len(names) == len(set(names))


@given(one=_SPECS, two=_SPECS, own=_SPECS)
def test_profiles_may_be_merged_before_or_after_the_run(
    one: dict[str, Any], two: dict[str, Any], own: dict[str, Any]
) -> None:
    together = spec_of(run(**own), merge_defaults(one, two))
    in_turn = spec_of(apply_defaults(run(**own), two), one)
    # Only the order of appended items may differ, not their content.
    assert _contains(together, in_turn) and _contains(in_turn, together)


def test_a_profile_never_changes_the_identity_of_a_run() -> None:
    defaults = {"image": "a/b:1", "resources": {"limits": {"nvidia.com/gpu": 8}}}
    merged = parse_run(apply_defaults(run(), defaults))
    assert merged.spec.image == "a/b:1" and merged.spec.resources.limits == {
        "nvidia.com/gpu": "8"
    }
    assert config_hash(merged) == config_hash(parse_run(run()))


@pytest.mark.parametrize(
    ("profile", "said"),
    [
        ([], "is not a mapping"),
        ({"default": {}}, "default: unknown key; did you mean `defaults`?"),
        ({"defaults": {"training": {}}}, "defaults.training: "),
        ({"defaults": {"storage": {"claimName": "x"}}}, "defaults.storage.claimName: "),
        (
            {"defaults": {"template": {"tolerations": [{"effect": "NoSchedul"}]}}},
            "defaults.template.tolerations[0].effect: 'NoSchedul' is not one of",
        ),
        (
            {"defaults": {"resources": {"requests": {"memory": "4"}}}},
            "defaults.resources.requests.memory: '4' is too little memory",
        ),
        (
            {"defaults": {"evaluation": {"resources": {"requests": {"gpu": 1}}}}},
            "defaults.evaluation.resources.requests.gpu: not a resource's name",
        ),
        (
            {"defaults": {"storage": {"storageClassName": "fast"}}},
            "defaults.storage.size: missing",
        ),
        ({"defaults": {"image": "Not An Image"}}, "defaults.image: "),
        ({"defaults": {"queueName": "a b"}}, "defaults.queueName: "),
        (
            {"defaults": {"template": {"env": [{"name": "RANK", "value": "0"}]}}},
            "defaults.template.env[0].name: 'RANK' is reserved",
        ),
        ({"allows": {"privileged": True}}, "allows.privileged: unknown key"),
        ({"allows": {"rdma": ["hca"]}}, "allows.rdma[0]: 'hca' is not a device"),
    ],
)
def test_an_invalid_profile_is_refused_with_the_position(profile: Any, said: str) -> None:
    problems = [str(one) for one in check_profile(profile)]
    assert any(said in one for one in problems), problems


def test_all_problems_of_a_profile_are_reported_together() -> None:
    wrong = {
        "defaults": {"image": "A B", "queueName": "a b"},
        "allows": {"rdma": ["x y/z"]},
    }
    assert len(check_profile(wrong)) == 3


def test_a_namespace_profile_may_set_defaults_but_not_allows() -> None:
    profile = {"defaults": {}, "allows": {"rdma": ["rdma/x"]}, "namespaces": ["a"]}
    assert check_profile(profile) == ()
    found = [str(one) for one in check_profile(profile, of_namespace=True)]
    assert [one.split(":")[0] for one in found] == ["namespaces", "allows"]
    assert all("has no meaning in a namespace" in one for one in found)


def test_rdma_devices_are_refused_unless_a_profile_lists_them() -> None:
    wanted = run(resources={"limits": {"rdma/a": 1, "rdma/b": 1, "nvidia.com/gpu": 1}})
    assert check_allowed(wanted, ["rdma/a", "rdma/b"]) == ()
    [problem] = check_allowed(wanted, ["rdma/a"])
    assert str(problem) == (
        "spec.resources.limits['rdma/b']: is not allowed by the profile of the run; it allows rdma/a. "
        "Name a profile that allows it (spec.profile), or remove it."
    )
    beside = run(evaluation={"resources": {"limits": {"rdma/c": 1}}})
    [problem] = check_allowed(beside, [])
    assert "it allows none" in str(problem)


# ---- evergrad validate -------------------------------------------------------------------------------------


def execute(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    validate.add_arguments(parser)
    return validate.execute(parser.parse_args([str(argument) for argument in arguments]))


def test_validate_shows_the_values_that_profiles_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("defaults: {image: registry.example/a:1, ttlSecondsAfterFinished: 60}")
    inner = "defaults: {queueName: team, image: registry.example/b:2}"
    two.write_text(yaml.safe_dump({"kind": "ConfigMap", "data": {"profile.yaml": inner}}))
    assert execute(BASE, "--profile", one, "--profile", two) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("valid: docs-lm ")
    assert sorted(line.split(":")[0] for line in lines[1:]) == [
        "  metadata.labels",
        "  spec.image",
        "  spec.ttlSecondsAfterFinished",
    ]
    assert any("registry.example/b:2" in line for line in lines)

    assert execute(BASE, "--profile", one, "--print-resolved") == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["spec"]["image"] == "registry.example/a:1"


def test_the_command_on_the_page_shows_the_values_that_its_profiles_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PAGE.read_text("utf-8")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    document, values, config_map = (yaml.safe_load(block) for block in blocks)
    (tmp_path / "trainingrun.yaml").write_text(yaml.safe_dump(document))
    (tmp_path / "a100.yaml").write_text(yaml.safe_dump(values["runs"]["profiles"]["a100"]))
    (tmp_path / "configmap.yaml").write_text(yaml.safe_dump(config_map))
    (command,) = re.findall(r"```sh\n(evergrad validate .*)\n```", text)
    monkeypatch.chdir(tmp_path)
    assert execute(*shlex.split(command)[2:]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    shown = dict(line.strip().split(": ", 1) for line in lines)
    assert sorted(shown) == [
        "metadata.labels",
        "spec.image",
        "spec.resources",
        "spec.storage",
        "spec.template",
        "spec.ttlSecondsAfterFinished",
    ]
    assert "team-a" in shown["metadata.labels"], (
        "the namespace's profile stands over the other"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("defaults: {images: x}", "profile.yaml: defaults.images: unknown key"),
        ("defaults: [", "profile.yaml:1"),
        ("kind: ConfigMap", "profile.yaml: the ConfigMap has no text profile.yaml"),
        (
            "{kind: ConfigMap, data: {profile.yaml: 'allows: {rdma: [rdma/x]}'}}",
            "profile.yaml: allows: has no meaning in a namespace",
        ),
        (
            "defaults: {resources: {limits: {rdma/x: 1}}}",
            "spec.resources.limits['rdma/x']: is not allowed by the profile",
        ),
    ],
)
def test_validate_refuses_an_invalid_profile(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profile.yaml").write_text(text)
    assert execute(BASE, "--profile", tmp_path / "profile.yaml") == 64
    assert said in capsys.readouterr().err
