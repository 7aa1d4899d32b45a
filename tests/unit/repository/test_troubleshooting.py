"""The code contains each text that the page on symptoms quotes."""

import ast
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_PAGE = (_ROOT / "docs/operate/troubleshooting.md").read_text("utf-8")
_SHORTEST = 9
"""Shorter pieces between two ellipses, such as a comma, are not significant."""


def symptoms() -> list[str]:
    """The quoted texts of the tables' first columns, cut at each ellipsis."""
    cells = [line.split("|")[1] for line in _PAGE.splitlines() if line.startswith("| ")]
    texts = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    pieces = [piece.strip() for text in texts for piece in text.split("…")]
    return sorted({piece for piece in pieces if len(piece) >= _SHORTEST})


@pytest.fixture(scope="module")
def said() -> str:
    """Return all texts of the product's code, with an ellipsis for each inserted value, and the Makefile."""
    found = [(_ROOT / "Makefile").read_text("utf-8")]
    for package in (
        "common",
        "coordinator",
        "manifest",
        "operator",
        "cli",
        "trainer_image",
        "latent_edit",
    ):
        for module in (_ROOT / package).glob("evergrad*/**/*.py"):
            for node in ast.walk(ast.parse(module.read_text("utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(
                            str(part.value) if isinstance(part, ast.Constant) else "…"
                            for part in node.values
                        )
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_the_page_quotes_many_texts() -> None:
    assert len(symptoms()) > 30


@pytest.mark.parametrize("text", symptoms())
def test_each_quoted_text_of_the_page_is_in_the_code(text: str, said: str) -> None:
    assert text in said
