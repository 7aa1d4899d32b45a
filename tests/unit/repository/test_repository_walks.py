"""The walks in docs/project/architecture.md: each file is there, and so is what is called in it."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_SECTION = (
    (_ROOT / "docs/project/architecture.md").read_text("utf-8").partition("## Walks")[2]
)
_WALKS = {
    title.strip(): [tuple(line.split(maxsplit=1)) for line in block.strip().splitlines()]
    for title, block in re.findall(
        r"^### ([^\n]+)\n.*?^```\n(.*?)^```$",
        _SECTION.partition("\n## ")[0],
        re.MULTILINE | re.DOTALL,
    )
}


@pytest.mark.parametrize("title", _WALKS)
def test_each_file_of_a_walk_exists_and_defines_what_is_called_in_it(title: str) -> None:
    for file, names in _WALKS[title]:
        defined = {
            node.name
            for node in ast.walk(ast.parse((_ROOT / file).read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert set(names.split(", ")) <= defined, file


def _names_in(file: str) -> set[str]:
    """Everything that a module imports, calls or reads by its name."""
    found = set()
    for node in ast.walk(ast.parse((_ROOT / file).read_text("utf-8"))):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name.rpartition(".")[2])
    return found


def test_each_file_on_the_way_to_the_optimizer_is_reached_from_a_file_before_it() -> None:
    """A file that was left out would be the one that names its successor.

    The other walks pass objects that callers get made, behind a protocol or through a queue, so that no name
    leads from one file to the next.
    """
    (steps,) = [steps for title, steps in _WALKS.items() if title.endswith("its optimizer")]
    before = _names_in(steps[0][0])
    for file, listed in steps[1:]:
        names, own = set(listed.split(", ")), _names_in(file)
        assert names & before, f"nothing before {file} names {listed}"
        assert names <= before | own, f"{file}: {names - before - own} are not on the way"
        before |= own
