"""The table of acceptance: what its check refuses, and that the table as it stands passes it."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def acceptance() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs"))
        names = ("capabilities", "acceptance")
        for name in names:
            spec = importlib.util.spec_from_file_location(
                name, ROOT / "docs" / f"{name}.py"
            )
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            patch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        yield module


def test_the_page_is_up_to_date_and_each_cell_has_a_test_or_is_called_missing() -> None:
    script = [sys.executable, str(ROOT / "docs" / "acceptance.py"), "--check"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "docs")}
    result = subprocess.run(
        script, capture_output=True, text=True, check=False, env=environment
    )
    assert (result.returncode, result.stderr) == (0, "")


def row(acceptance: ModuleType, **changes: object) -> object:
    values = {
        "id": "8d-1a",
        "group": "1. Resumes",
        "part": "Stopped and started again",
        "recipes": "sft latent_edit",
        "missing": (),
        "note": "the others are shown elsewhere",
    }
    return acceptance.Row(**{**values, **changes})


def carried(acceptance: ModuleType, *cells: str) -> dict[str, list[object]]:
    return {cell: [acceptance.ShowingTest("tests/x.py", "test_x")] for cell in cells}


BOTH = ("8d-1a:sft", "8d-1a:latent_edit")


def test_a_row_whose_cells_all_have_tests_is_sound(acceptance: ModuleType) -> None:
    assert acceptance.check([row(acceptance)], carried(acceptance, *BOTH)) == []
    every = row(acceptance, recipes="all", note="")
    cells = [f"8d-1a:{name}" for name in acceptance.RECIPES]
    assert acceptance.check([every], carried(acceptance, *cells)) == []
    one = row(acceptance, recipes="any", note="")
    assert acceptance.check([one], carried(acceptance, "8d-1a")) == []
    assert acceptance.check([row(acceptance, recipes="none")], {}) == []


@pytest.mark.parametrize(
    ("changes", "cells", "problem"),
    [
        ({}, BOTH[:1], "8d-1a:latent_edit: no test carries it."),
        (
            {"missing": ("sft",)},
            BOTH,
            "8d-1a:sft: a test carries it. Take it out of `missing`.",
        ),
        ({"missing": ("pretrain",)}, BOTH, "8d-1a: pretrain cannot be missing"),
        ({"note": ""}, BOTH, "8d-1a: sft latent_edit, without a reason."),
        (
            {"recipes": "all", "note": "", "missing": ("sft",)},
            (),
            "8d-1a: missing, without",
        ),
        ({"recipes": "chess"}, ("8d-1a:chess",), "8d-1a: 'chess' are no recipes."),
        ({"id": "group 1"}, ("group 1:sft", "group 1:latent_edit"), "'group 1': is no id."),
        (
            {},
            (*BOTH, "8d-1b:sft"),
            "8d-1b:sft: tests/x.py::test_x carries it, and the table has",
        ),
    ],
)
def test_an_unsound_row_is_named(
    acceptance: ModuleType, changes: dict[str, object], cells: tuple[str, ...], problem: str
) -> None:
    found = acceptance.check([row(acceptance, **changes)], carried(acceptance, *cells))
    assert found[0].startswith(problem)


def test_an_id_stands_once(acceptance: ModuleType) -> None:
    found = acceptance.check([row(acceptance)] * 2, carried(acceptance, *BOTH))
    assert found == ["8d-1a: stands 2 times in the table. Give each row an id of its own."]


def test_the_page_counts_cells_that_run_in_long_alone(acceptance: ModuleType) -> None:
    tests = carried(acceptance, BOTH[0])
    tests[BOTH[1]] = [acceptance.ShowingTest("tests/x.py", "test_y", is_long=True)]
    page = acceptance.render([row(acceptance)], tests)
    assert "| 1. Resumes | 1 | 2 | 1 | 1 | 0 |" in page
    assert "| 8d-1a |  | latent_edit | x.py: test_y (long) |" in page


def test_markers_of_long_functions_and_modules_are_found(
    acceptance: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.long\n"
        "@pytest.mark.acceptance('8d-1a:sft', '8d-8a')\n"
        "def test_a(): ...\n"
        "@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.long), 2])\n"
        "@pytest.mark.acceptance('8d-8b')\n"
        "def test_b(): ...\n"
    )
    (folder / "test_two.py").write_text(
        "import pytest\npytestmark = pytest.mark.long\n"
        "@pytest.mark.acceptance('8d-8b')\ndef test_c(): ...\n"
    )
    found = acceptance.find_tests(folder, "acceptance")
    first = acceptance.ShowingTest("tests/test_one.py", "test_a", is_long=True)
    assert found == {
        "8d-1a:sft": [first],
        "8d-8a": [first],
        "8d-8b": [
            acceptance.ShowingTest("tests/test_one.py", "test_b"),
            acceptance.ShowingTest("tests/test_two.py", "test_c", is_long=True),
        ],
    }
