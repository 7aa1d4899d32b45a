"""The script that counts how the product reads. Sizes are a report (`make numbers`); only import cycles fail."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

MODULE = '''"""Adds."""

from math import pi


class Adder:
    """Has one public method."""

    def add(self, one: int) -> int:
        # Why it is so.
        return one + _two()  # not a line of its own

    def _never(self) -> None: ...


def _two() -> int:
    return 2
'''


@pytest.fixture(scope="module")
def readability() -> Iterator[ModuleType]:
    path = Path(__file__).resolve().parents[3] / "tools/numbers/readability.py"
    spec = importlib.util.spec_from_file_location("readability", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["readability"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["readability"]


@pytest.fixture(scope="module")
def product(readability: ModuleType, root: Path) -> dict[str, str]:
    return dict(readability.read_product(root, None))


def test_functions_classes_and_comments_are_counted(readability: ModuleType) -> None:
    numbers = readability.count({"a/b/c.py": MODULE})
    assert (numbers.modules, numbers.lines, numbers.longest_class) == (1, 17, "8 Adder")
    assert (numbers.median_function, numbers.longest_function) == (2, "3 add")
    assert numbers.most_public_methods == "1 Adder"
    assert numbers.comments_per_100_code_lines == round(100 / 7, 2)


def test_a_private_function_counts_as_called_once_by_its_name_in_its_own_module(
    readability: ModuleType,
) -> None:
    assert readability.find_private_called_once(MODULE) == ["_two"]
    assert readability.find_private_called_once(MODULE + "_two()\n") == []


def test_the_product_is_every_folder_with_a_package_description(
    readability: ModuleType,
) -> None:
    names = [
        "cli/pyproject.toml",
        "cli/e/main.py",
        "tests/check.py",
        "pyproject.toml",
        "x.py",
    ]
    assert readability.select_product(names) == ["cli/e/main.py"]


def test_a_trend_shows_each_number_then_and_now(readability: ModuleType) -> None:
    before = readability.count({"a/b/c.py": "def one(): ...\n"})
    now = readability.count(
        {"a/b/c.py": "def one(a, b, c, d, e, f, *, g): ...\n\n\nX = 1\n"}
    )
    lines = readability.render_trend("main", before, now).splitlines()
    assert "| lines | 1 | 4 | +3 |" in lines
    assert "| functions over 6 parameters | 0 | 1 | +1 |" in lines
    assert "| longest function | 1 one | 1 one |  |" in lines


def test_import_cycles_are_found(readability: ModuleType) -> None:
    texts = {
        "x/p/a.py": "from p import b",
        "x/p/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.c",
        "x/p/c.py": "from p.a import name",
        "x/p/d.py": "import p.a",
    }
    assert readability.find_circles(texts) == [["p.a", "p.b", "p.c"]]


def test_the_product_has_no_import_cycles(
    readability: ModuleType, product: dict[str, str]
) -> None:
    assert len(product) > 200
    assert readability.find_circles(product) == []
