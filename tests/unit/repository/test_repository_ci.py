"""The packages that `.ci/run` installs, and that the workflows for GitHub are valid, as far as can be checked
here."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bed.requirements import COMMANDS, PLUGINS

CI = Path(__file__).resolve().parents[3] / ".ci/run"


def test_ci_installs_everything_that_the_test_bed_needs() -> None:
    text = CI.read_text("utf-8")
    assert [
        f"{command}:{package}"
        for command, package in COMMANDS.items()
        if f"{command}:{package}" not in text
    ] == []
    assert f"[ -x {PLUGINS} ]" in text


WORKFLOWS = sorted((CI.parents[1] / ".github/workflows").glob("*.yaml"))


def scripts_of(workflow: dict[str, Any]) -> list[str]:
    return [
        step["run"]
        for job in workflow["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_runs_valid_scripts_and_existing_make_targets(file: Path) -> None:
    makefile = (CI.parents[1] / "Makefile").read_text("utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    scripts = scripts_of(yaml.safe_load(file.read_text("utf-8")))
    assert scripts
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
        assert set(re.findall(r"\bmake ([a-z-]+)", script)) <= targets
        # Values of an event are never part of a script's text; they are variables in its environment.
        assert "${{" not in script


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_may_only_read_the_sources_except_for_reviewed_jobs(
    file: Path,
) -> None:
    workflow = yaml.safe_load(file.read_text("utf-8"))
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "permissions" not in job or job["environment"] == "release"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_names_each_action_by_its_repository_and_a_version(file: Path) -> None:
    # actionlint accepts any reference, for example @tools/release/v1, which a move of folders had made of @release/v1.
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    used = [step["uses"] for job in jobs for step in job["steps"] if "uses" in step]
    assert used
    for one in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v[0-9]+", one), one


def test_there_are_workflows_for_checks_and_for_releases() -> None:
    assert [file.name for file in WORKFLOWS] == ["ci.yaml", "release.yaml"]
