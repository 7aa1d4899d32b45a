"""The table of acceptance: errors that its check reports, and that the current table passes."""

from pathlib import Path

import pytest
from evidence import acceptance, capabilities


def test_each_cell_has_a_test_or_is_listed_as_missing() -> None:
    tests = capabilities.find_tests(capabilities.ROOT / "tests", acceptance.MARKER)
    assert acceptance.check(acceptance.read_rows(acceptance.DATA), tests) == []


def row(**changes: object) -> object:
    values = {
        "id": "8d-1a",
        "group": "1. Resumes",
        "part": "Stopped and started again",
        "recipes": "sft latent_edit",
        "missing": (),
        "note": "the others are shown elsewhere",
    }
    return acceptance.Row(**{**values, **changes})


def carried(*cells: str) -> dict[str, list[object]]:
    return {cell: [capabilities.ShowingTest("tests/x.py", "test_x")] for cell in cells}


BOTH = ("8d-1a:sft", "8d-1a:latent_edit")


def test_a_row_whose_cells_all_have_tests_is_valid() -> None:
    assert acceptance.check([row()], carried(*BOTH)) == []
    every = row(recipes="all", note="")
    cells = [f"8d-1a:{name}" for name in acceptance.RECIPES]
    assert acceptance.check([every], carried(*cells)) == []
    one = row(recipes="any", note="")
    assert acceptance.check([one], carried("8d-1a")) == []
    assert acceptance.check([row(recipes="none")], {}) == []


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
def test_an_invalid_row_is_reported(
    changes: dict[str, object], cells: tuple[str, ...], problem: str
) -> None:
    found = acceptance.check([row(**changes)], carried(*cells))
    assert found[0].startswith(problem)


def test_an_id_is_unique() -> None:
    found = acceptance.check([row()] * 2, carried(*BOTH))
    assert found == ["8d-1a: stands 2 times in the table. Give each row an id of its own."]


def test_cells_of_functions_and_modules_are_found(tmp_path: Path) -> None:
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
    found = capabilities.find_tests(folder, "acceptance")
    first = capabilities.ShowingTest("tests/test_one.py", "test_a")
    assert found == {
        "8d-1a:sft": [first],
        "8d-8a": [first],
        "8d-8b": [
            capabilities.ShowingTest("tests/test_one.py", "test_b"),
            capabilities.ShowingTest("tests/test_two.py", "test_c"),
        ],
    }
