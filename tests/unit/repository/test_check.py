"""``make check``: the tests that it selects for a change, and its warnings."""

from pathlib import Path

import check
import pytest


def test_a_changed_module_selects_the_tests_that_import_it(root: Path) -> None:
    file = "operator/evergrad_operator/edge/cache/queue.py"
    assert (root / file).is_file()
    chosen = check.choose_tests([file])
    assert "tests/unit/operator/test_operator_queue.py" in chosen
    assert "tests/unit/data/test_data_mixture.py" not in chosen


def test_a_changed_test_is_selected_and_a_page_selects_none() -> None:
    test = "tests/unit/repository/test_check.py"
    assert check.choose_tests([test, "README.md", "docs/train/data.md"]) == [test]


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
def test_words_of_the_old_dialect_give_a_warning(text: str, found: list[str]) -> None:
    warnings = check.find_prose([("page.md", 3, text)])
    assert warnings == [f"page.md:3: {one}" for one in found]
