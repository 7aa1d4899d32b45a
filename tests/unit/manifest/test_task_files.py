"""The files of a user's task: next to the manifest, or contained in it."""

from pathlib import Path
from typing import Any

import pytest

from evergrad_manifest.crd.definition import build_root
from evergrad_manifest.errors import ConfigurationError
from evergrad_manifest.files.task_files import (
    collect_task,
    task_folder,
    task_path,
    task_problems,
    write_task,
)
from evergrad_manifest.training import Training
from evergrad_manifest.training.own_task import MOST_FILE_BYTES
from evergrad_manifest.validation import problems_of

MANIFEST: dict[str, Any] = {
    "model": {"config": {"model_type": "llama"}},
    "data": {"sources": [{"name": "docs", "path": "docs.jsonl"}], "sequenceLength": 16},
    "batching": {"globalBatchSize": 4, "microBatchSize": 2},
    "optimizer": {"learningRate": 1e-3},
    "horizon": {"steps": 3},
}


def training(**changes: Any) -> Training:
    return Training.model_validate({**MANIFEST, "recipe": "mine:Task", **changes})


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A task that imports a module and a package next to it, and one file that it does not import."""
    (tmp_path / "mine.py").write_text(
        "import torch\nimport losses\nfrom parts.table import TABLE\n"
    )
    (tmp_path / "losses.py").write_text("ONE = 1\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/__init__.py").write_text("")
    (tmp_path / "parts/table.py").write_text("TABLE = {}\n")
    (tmp_path / "other.py").write_text("raise SystemExit\n")
    return tmp_path


@pytest.mark.acceptance("8d-16d")
@pytest.mark.capability("A-64")
def test_the_task_and_its_neighbouring_imports_are_collected(beside: Path) -> None:
    files = collect_task(training(), beside)
    assert set(files) == {"mine.py", "losses.py", "parts/__init__.py", "parts/table.py"}
    assert files["losses.py"] == "ONE = 1\n"
    assert collect_task(training(recipe="pretrain"), beside) == {}


def test_carried_files_are_written_into_a_folder_named_by_their_content(
    beside: Path, tmp_path: Path
) -> None:
    files = collect_task(training(), beside)
    carried, changed = (
        training(files=files),
        training(files={**files, "losses.py": "ONE = 2\n"}),
    )
    volume = tmp_path / "volume"
    for one in (carried, carried, changed):
        write_task(one, volume)
    folder = task_folder(carried, volume)
    assert folder.parent == volume and folder != task_folder(changed, volume)
    assert {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    } == set(files)
    assert task_path(carried, volume) == folder / "mine.py"
    assert (task_folder(changed, volume) / "losses.py").read_text() == "ONE = 2\n"


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    task = training(files={"mine.py": "ONE = 1\n"})
    path = task_folder(task, tmp_path) / "mine.py"
    for damage in (b"", b"ONE", b"\xff"):
        write_task(task, tmp_path)
        path.write_bytes(damage)
        write_task(task, tmp_path)
        assert path.read_text() == "ONE = 1\n"
    assert [one.name for one in path.parent.iterdir()] == ["mine.py"]


def test_a_missing_task_file_is_a_problem_of_the_recipe(beside: Path) -> None:
    assert task_problems(training(), base_directory=beside) == []
    (problem,) = task_problems(training(recipe="yours:Task"), base_directory=beside)
    assert str(problem).startswith(
        "spec.training.recipe: the module yours was not found; there is no "
    )


def test_a_task_that_is_too_large_to_carry_is_refused(beside: Path) -> None:
    (beside / "losses.py").write_text(f"TEXT = '{'x' * 300_000}'\n")
    with pytest.raises(
        ConfigurationError, match=r"bytes together; a run carries at most 262,144"
    ):
        collect_task(training(), beside)


def carried(recipe: str, *names: str) -> list[str]:
    """Return the problems of a run that contains files with these names."""
    wrong = {"recipe": recipe, "files": dict.fromkeys(names, "")}
    run = {"metadata": {"name": "docs"}, "spec": {"training": {**MANIFEST, **wrong}}}
    return [str(problem) for problem in problems_of(run)]


@pytest.mark.parametrize("name", ["mine.py", "mine/__init__.py"])
def test_a_run_carries_the_module_that_its_recipe_names_as_a_file_or_as_a_package(
    name: str,
) -> None:
    assert carried("mine:Task", name) == []
    assert carried("mine.parts:Task", "mine/parts.py", name) == []


@pytest.mark.capability("A-2")
def test_a_run_without_its_module_among_the_files_is_refused_before_a_node_starts() -> None:
    (problem,) = carried("mine:Task", "yours.py")
    assert problem.startswith("spec.training.files: mine.py is not among the files. Add it")


@pytest.mark.parametrize(
    "name",
    ["../mine.py", "/mine.py", "parts/../../mine.py", "mine.sh", ".mine.py", "a//b.py"],
)
def test_no_file_name_leads_out_of_its_folder(name: str) -> None:
    assert any(
        "cannot be a file's name" in problem
        for problem in carried("mine:Task", "mine.py", name)
    )


def test_the_api_server_can_store_all_files_that_submit_sends() -> None:
    node = build_root()["properties"]["spec"]["properties"]["training"]["properties"][
        "files"
    ]
    assert (node["maxProperties"], node["additionalProperties"]["maxLength"]) == (
        64,
        MOST_FILE_BYTES,
    )
