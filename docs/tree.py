"""Writes the tree of the packages into CONTRIBUTING.md: a line a file or folder, from the first line of its
docstring."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
PACKAGES = (
    "coordinator/evergrad_coordinator",
    "manifest/evergrad_manifest",
    "operator/evergrad_operator",
    "cli/evergrad_cli",
    "trainer_image/evergrad_trainer",
    "trainer_image/evergrad",
    "monitoring/evergrad_monitoring",
)
OPEN = "coordinator/evergrad_coordinator"
"""The package whose folders are shown with their files: the smallest, and the one to read first."""
MAX_TEXT = 82
_BLOCK = re.compile(r"(<!-- tree: make generate -->\n```\n).*?(```\n)", re.DOTALL)


def render(root: Path) -> str:
    """The tree as text."""
    return "".join(
        f"{line.rstrip()}\n"
        for package in PACKAGES
        for line in (f"{package}/", *_lines(root / package))
    )


def _lines(folder: Path, *, indent: str = "    ") -> Iterator[str]:
    """Modules first, then folders, each with its duty."""
    modules = sorted(one for one in folder.glob("*.py") if one.name != "__init__.py")
    folders = sorted(one.parent for one in folder.glob("*/__init__.py"))
    for module in modules:
        yield f"{indent}{module.name:<20} {read_duty(module)}"
    for inner in folders:
        yield f"{indent}{inner.name + '/':<20} {read_duty(inner / '__init__.py')}"
        if OPEN in inner.as_posix():
            yield from _lines(inner, indent=indent + "    ")


def read_duty(module: Path) -> str:
    """The first sentence of a module's docstring, cut at a comma or colon where it is long."""
    text = " ".join(
        (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split()
    )
    duty = re.split(r"(?<=[.?!])\s|; ", text.replace("``", "`"))[0].rstrip(".")
    if len(duty) <= MAX_TEXT:
        return duty
    ends = [
        found.start()
        for found in re.finditer(r"[,:](?= )", duty)
        if found.start() <= MAX_TEXT
    ]
    return duty[: ends[-1] if ends else MAX_TEXT]


def main(arguments: list[str]) -> int:
    """Write the tree; with ``--check`` only say whether it is up to date."""
    page = PAGE.read_text(encoding="utf-8")
    wanted = _BLOCK.sub(lambda found: found[1] + render(ROOT) + found[2], page)
    if page == wanted:
        return 0
    if "--check" in arguments:
        what = "a file came, went or changed its first line"
        print(
            f"CONTRIBUTING.md: the tree of the packages is out of date; {what}. Run make generate."
        )
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
