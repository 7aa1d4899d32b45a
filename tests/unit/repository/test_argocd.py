"""The scripts for Argo CD: the health of a run and what a person may do with it, in Argo CD's own layout of
test data.

By the Lua that Argo CD has in it, and in `make test-long` by Argo CD v3.0.0 itself.
"""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from bed import toolbox

ROOT = Path(__file__).resolve().parents[3]
ARGO = ROOT / "examples/gitops/argocd"
SCRIPTS = ARGO / "resource_customizations/evergrad.dev/TrainingRun"
ACTIONS = ("restart", "resume", "suspend")
PROGRAMS = [
    "lua",
    pytest.param("argolua", marks=[pytest.mark.long, pytest.mark.timeout(3600)]),
]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def make_scripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "make_argocd_cm", ARGO / "make_argocd_cm.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest) -> str:
    name = str(request.param)
    if reason := toolbox.unavailable(name):
        pytest.skip(reason)
    return name


def ask(program: str, runs: list[Any], *, data: dict[str, str]) -> list[dict[str, Any]]:
    """Health, actions by name and what each action would store, of each run; ``data``: of argocd-cm."""
    key = "resource.customizations.{}.evergrad.dev_TrainingRun"
    actions = yaml.safe_load(data[key.format("actions")])
    question = {
        "health": data[key.format("health")],
        "discovery": actions["discovery.lua"],
        "actions": {one["name"]: one["action.lua"] for one in actions["definitions"]},
        "objects": runs,
    }
    answers: list[dict[str, Any]] = toolbox.ask(program, question)
    for answer in answers:
        if isinstance(answer["actions"], list):
            listed = {one.pop("name"): one for one in answer["actions"]}
            answer["actions"] = {
                name: {"disabled": False, **one} for name, one in listed.items()
            }
    return answers


@pytest.fixture(scope="module")
def data() -> dict[str, str]:
    """Return the content of the ConfigMap that a user applies."""
    found: dict[str, str] = load(ARGO / "argocd-cm.yaml")["data"]
    return found


def test_the_config_map_contains_the_scripts_unchanged(data: dict[str, str]) -> None:
    text = make_scripts().build_text()
    assert (ARGO / "argocd-cm.yaml").read_text("utf-8") == text, "make generate writes it"
    health = data["resource.customizations.health.evergrad.dev_TrainingRun"]
    assert health == (SCRIPTS / "health.lua").read_text("utf-8")


def test_argo_cd_shows_each_state_of_a_run_as_in_the_test_data(
    program: str, data: dict[str, str]
) -> None:
    tests = load(SCRIPTS / "health_test.yaml")["tests"]
    assert {one["inputPath"] for one in tests} == {
        f"testdata/{path.name}" for path in SCRIPTS.glob("testdata/*")
    }
    runs = [load(SCRIPTS / one["inputPath"]) for one in tests]
    for one, answer in zip(tests, ask(program, runs, data=data), strict=True):
        assert answer["health"] == one["healthStatus"], one["inputPath"]


def test_argo_cd_waits_for_a_run_without_a_status(
    program: str, data: dict[str, str]
) -> None:
    run = load(SCRIPTS / "testdata/new.yaml")
    del run["status"]
    [answer] = ask(program, [run], data=data)
    assert answer["health"] == {
        "status": "Progressing",
        "message": "waiting for the operator",
    }
    assert answer["results"]["restart"]["spec"]["restartNonce"] == "argocd-1"


def test_a_training_run_can_count_as_healthy_with_one_more_line(
    program: str, data: dict[str, str]
) -> None:
    lines = [
        line
        for line in (ROOT / "docs/operate/gitops.md").read_text("utf-8").splitlines()
        if line.startswith("if is.Ready")
    ]
    assert len(lines) == 1
    key = "resource.customizations.health.evergrad.dev_TrainingRun"
    script = data[key].replace("\nreturn hs\n", f"\n{lines[0]}\nreturn hs\n")
    assert script != data[key]
    runs = [
        load(SCRIPTS / f"testdata/{name}.yaml")
        for name in ("running", "queued", "suspended")
    ]
    answers = ask(program, runs, data={**data, key: script})
    assert [one["health"]["status"] for one in answers] == [
        "Healthy",
        "Progressing",
        "Suspended",
    ]


def test_argo_cd_offers_only_applicable_actions_in_each_state(
    program: str, data: dict[str, str]
) -> None:
    tests = load(SCRIPTS / "actions/action_test.yaml")["discoveryTests"]
    runs = [load(SCRIPTS / "actions" / one["inputPath"]) for one in tests]
    for one, answer in zip(tests, ask(program, runs, data=data), strict=True):
        expected = {result.pop("name"): result for result in one["result"]}
        assert answer["actions"] == expected, one["inputPath"]


def test_each_action_changes_only_its_field(program: str, data: dict[str, str]) -> None:
    tests = load(SCRIPTS / "actions/action_test.yaml")["actionTests"]
    assert tuple(sorted(one["action"] for one in tests)) == ACTIONS
    runs = [load(SCRIPTS / "actions" / one["inputPath"]) for one in tests]
    for one, answer in zip(tests, ask(program, runs, data=data), strict=True):
        expected = load(SCRIPTS / "actions" / one["expectedOutputPath"])
        assert answer["results"][one["action"]] == expected, one["action"]


def test_a_second_click_on_restart_before_the_first_takes_effect_restarts_once(
    program: str, data: dict[str, str]
) -> None:
    run = load(SCRIPTS / "testdata/running.yaml")
    [first] = ask(program, [run], data=data)
    clicked = first["results"]["restart"]
    restarted = {**clicked, "status": {**clicked["status"], "attempt": 1}}
    again, later = ask(program, [clicked, restarted], data=data)
    assert again["results"]["restart"]["spec"] == clicked["spec"]
    assert later["results"]["restart"]["spec"]["restartNonce"] == "argocd-2"
