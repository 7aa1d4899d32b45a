"""The walks in docs/project/architecture.md: each file exists, and contains the functions that the walk
names."""

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
def test_each_file_of_a_walkthrough_exists_and_defines_the_named_functions(
    title: str,
) -> None:
    for file, names in _WALKS[title]:
        defined = {
            node.name
            for node in ast.walk(ast.parse((_ROOT / file).read_text("utf-8")))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        assert set(names.split(", ")) <= defined, file
