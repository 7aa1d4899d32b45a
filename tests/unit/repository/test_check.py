"""``make check``: which tests it chooses for a change, and what it warns of."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def check(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", root / "tests/check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_changed_module_chooses_the_tests_that_import_it(
    check: ModuleType, root: Path
) -> None:
    file = "operator/evergrad_operator/queue.py"
    assert (root / file).is_file()
    chosen = check.choose_tests([file])
    assert "tests/unit/operator/test_operator_queue.py" in chosen
    assert "tests/unit/data/test_data_mixture.py" not in chosen


def test_a_changed_test_is_chosen_and_a_page_chooses_none(check: ModuleType) -> None:
    test = "tests/unit/repository/test_check.py"
    assert check.choose_tests([test, "README.md", "docs/data.md"]) == [test]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The node sends its state anew.", ["'anew': write again"]),
        ("The node sends its state again.", []),
        ("This is no number.", ["'is no number': write is not a …"]),
        ("It is no longer used, and there is no more room.", []),
        ("A number beside another.", ["'beside': write next to, or compared with"]),
    ],
)
def test_words_of_the_old_dialect_are_warned_of(
    check: ModuleType, text: str, found: list[str]
) -> None:
    warnings = check.find_prose([("page.md", 3, text)])
    assert warnings == [f"page.md:3: {one}" for one in found]
