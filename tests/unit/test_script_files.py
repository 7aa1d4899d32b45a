"""What a script run needs on this machine, against real files."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.envelope.script import Script
from evergrad_manifest.script_files import (
    is_module_found,
    portable_problems,
    script_problems,
)


def a_script(*command: str, **more: Any) -> Script:
    return Script.model_validate({"command": list(command), **more})


def problems(folder: Path, script: Script) -> list[str]:
    return [str(problem) for problem in script_problems(script, base_directory=folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a script, an executable, a module and a package."""
    (tmp_path / "train.py").touch()
    (tmp_path / "start").touch()
    (tmp_path / "start").chmod(0o755)
    (tmp_path / "code" / "package").mkdir(parents=True)
    (tmp_path / "code" / "package" / "main.py").touch()
    return tmp_path


@pytest.mark.parametrize(
    "script",
    [
        a_script("train.py"),
        a_script("./start", workingDirectory="code"),
        a_script("sh"),
        a_script(sys.executable, "-c", "pass"),
        a_script("-m", "package.main"),
    ],
    ids=lambda script: " ".join(script.command)[-20:],
)
def test_existing_files_and_programs_give_no_problem(script: Script, folder: Path) -> None:
    assert problems(folder, script) == []


def test_a_missing_file_is_reported_with_the_field_and_a_remedy(folder: Path) -> None:
    remedy = "Check the path; it is relative to the manifest's directory."
    assert problems(folder, a_script("trian.py", workingDirectory="cod")) == [
        f"{folder}/trian.py: does not exist; spec.script.command names it. {remedy}",
        f"{folder}/cod: does not exist; spec.script.workingDirectory names it. {remedy}",
    ]
    assert problems(folder, a_script("bin/start")) == [
        f"{folder}/bin/start: does not exist; spec.script.command names it. {remedy}"
    ]


def test_a_variable_from_a_cluster_object_must_be_set_in_the_local_shell(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = {"name": "hub", "key": "token"}
    sources = {
        "HF_TOKEN": {"secretKeyRef": key},
        "OTHER": {"secretKeyRef": {**key, "optional": True}},
    }
    monkeypatch.delenv("HF_TOKEN", raising=False)
    script = a_script("train.py", valueFrom=sources)
    assert problems(folder, script) == [
        (
            "spec.script.valueFrom.HF_TOKEN: HF_TOKEN is not set on this machine; its value comes from an object of the cluster, and this run does not start there. Set it in the shell: HF_TOKEN=… evergrad run."
        )
    ]
    monkeypatch.setenv("HF_TOKEN", "x")
    assert problems(folder, script) == []


def test_a_path_of_the_wrong_kind_is_reported(folder: Path) -> None:
    (folder / "folder.py").mkdir()
    assert (
        "folder.py: is a directory; spec.script.command names it. Name the file in it"
        in problems(folder, a_script("folder.py"))[0]
    )
    (said,) = problems(folder, a_script("train.py", workingDirectory="start"))
    assert "start: is not a directory; spec.script.workingDirectory names it" in said
    assert (
        "cannot be read: Not a directory" in problems(folder, a_script("start/train.py"))[0]
    )


def test_a_file_without_execute_permission_is_reported(folder: Path) -> None:
    (folder / "start").chmod(0o644)
    (said,) = problems(folder, a_script("./start"))
    assert (
        "start: cannot be executed; permission is denied (spec.script.command names it)"
        in said
    )


def test_a_name_without_a_slash_is_searched_in_the_path_of_the_workers(
    folder: Path,
) -> None:
    assert problems(folder, a_script("start")) == [
        (
            "spec.script.command[0]: the executable 'start' was not found; a name without a "
            "slash is looked up in PATH. "
            "Install it, or write ./start."
        )
    ]
    assert problems(folder, a_script("start", env={"PATH": str(folder)})) == []
    assert (
        "looked up in spec.script.env.PATH"
        in problems(folder, a_script("sh", env={"PATH": str(folder)}))[0]
    )


@pytest.mark.parametrize(
    "name",
    ["x" * 5000 + ".py", "a\u2028b.py", "\udcff.py"],
    ids=["long", "unprintable", "undecodable"],
)
def test_the_problem_of_an_unusual_name_is_printable(name: str, folder: Path) -> None:
    (said,) = problems(folder, a_script(name))
    assert said.isprintable() and len(said) < 500


def test_a_module_is_found_without_importing_it(folder: Path) -> None:
    (folder / "code" / "package" / "main.py").write_text("raise SystemExit('imported')")
    inside = a_script("-m", "package.main", workingDirectory="code")
    assert is_module_found(inside, base_directory=folder)
    assert not is_module_found(a_script("-m", "package.main"), base_directory=folder)
    assert is_module_found(
        a_script("-m", "package.main", env={"PYTHONPATH": f"none{os.pathsep}code"}),
        base_directory=folder,
    )
    assert not is_module_found(
        a_script("-m", "package.other", workingDirectory="code"), base_directory=folder
    )
    assert not is_module_found(
        a_script("-m", "package.main.deeper", workingDirectory="code"),
        base_directory=folder,
    )
    assert is_module_found(a_script("-m", "json.tool"), base_directory=folder)


def test_only_files_next_to_the_manifest_are_required_everywhere(folder: Path) -> None:
    for missing in (
        a_script("/code/train.py"),
        a_script("-m", "nothing"),
        a_script("nothing"),
        a_script("./nothing"),
    ):
        assert portable_problems(missing, base_directory=folder) == []
    (problem,) = portable_problems(a_script("nothing.py"), base_directory=folder)
    assert problem.path == f"{folder}/nothing.py"
