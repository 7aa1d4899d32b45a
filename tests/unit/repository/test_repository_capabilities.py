"""The table of capabilities: errors that its check reports, and that the current table passes."""

from pathlib import Path

import pytest
from evidence import capabilities


def test_each_working_row_has_a_test_and_refers_to_existing_things_only() -> None:
    tests = capabilities.find_tests(capabilities.ROOT / "tests")
    assert capabilities.check(capabilities.read_rows(capabilities.DATA), tests) == []


@pytest.mark.parametrize(
    "name",
    [
        "spec.training.horizon.steps",
        "spec.training.data.sources[].path",
        "evergrad run --nodes",
        "make bench",
        "column loss",
        "docs/train/evaluation.md",
        "evergrad_trainer.task:Task.loss",
        "evergrad_step",
    ],
)
def test_an_existing_name_has_no_fault(name: str) -> None:
    assert capabilities.find_fault(name) is None


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("spec.training.horizon.iterations", "the file has no such field"),
        ("evergrad run --iterations", "the command has no option --iterations"),
        ("make magic", "the Makefile has no such target"),
        ("column perplexities", "metrics.jsonl has no such column"),
        ("docs/nowhere.md", "there is no such file"),
        ("evergrad_trainer.task:Task.lose", "the module has no Task.lose"),
        ("evergrad_trainer.tasks:Task", "there is no such module"),
        ("evergrad_steps_of_nothing", "the catalogue has no such metric"),
    ],
)
def test_a_missing_name_is_a_fault(name: str, fault: str) -> None:
    assert capabilities.find_fault(name) == fault


def test_a_missing_command_is_a_fault() -> None:
    fault = capabilities.find_fault("evergrad train")
    assert fault.startswith("there is no such command. Known: run, node")


def row(**changes: object) -> object:
    values = {
        "id": "G-1",
        "system": "GenoLeWM",
        "capability": "steps",
        "state": "works",
        "where": ("spec.training.horizon.steps",),
        "note": "",
    }
    return capabilities.Row(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"state": "done"}, "G-1: 'done' is no state"),
        ({"where": ()}, "G-1: works, but no field or command is named"),
        ({"state": "missing"}, "G-1: missing, without a reason"),
        ({"state": "refused"}, "G-1: refused, without a reason"),
        ({"where": ("spec.nowhere",)}, "G-1: spec.nowhere: the file has no such field"),
    ],
)
def test_an_invalid_row_is_reported(changes: dict[str, object], problem: str) -> None:
    tests = {"G-1": [capabilities.ShowingTest("tests/x.py", "test_x")]}
    [found] = capabilities.check([row(**changes)], tests)
    assert found.startswith(problem)


def test_a_row_without_a_test_does_not_work() -> None:
    [found] = capabilities.check([row()], {})
    assert found == "G-1: works, but no test carries it. Mark the test that shows it."


def test_an_id_is_unique_and_a_marker_names_a_row() -> None:
    tests = {
        "G-1": [capabilities.ShowingTest("tests/x.py", "test_x")],
        "G-2": [capabilities.ShowingTest("tests/x.py", "test_y")],
    }
    found = capabilities.check([row(), row()], tests)
    assert found == [
        "G-1: stands 2 times in the table. Give each row an id of its own.",
        "G-2: tests/x.py::test_y carries it, and the table has no such row.",
    ]


def test_markers_of_functions_and_of_modules_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.slow, pytest.mark.capability('G-1')]\n"
        "@pytest.mark.capability('G-2', 'C-1')\n"
        "def test_a(): ...\n"
        "def helper(): ...\n"
    )
    found = capabilities.find_tests(folder)
    shown = capabilities.ShowingTest("tests/test_one.py", "test_a")
    assert found == {"G-1": [shown], "G-2": [shown], "C-1": [shown]}
