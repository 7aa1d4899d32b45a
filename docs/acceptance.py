"""Writes docs/acceptance.md from docs/acceptance.csv and the tests that show each of its cells.

Each row is one statement: a part of a group of acceptance tests, a number that the documentation of another
system states, or input that has to be refused. ``recipes`` says for which recipes it has to be shown:
``all``, some by their names, ``any`` (one test is enough: all recipes share it) or ``none`` (it does not
apply). What leaves a recipe out has its reason in ``note``. ``missing`` names the recipes, or ``any``, of
which no test shows it yet.

Tests carry cells, with the recipe where the row has recipes:
``@pytest.mark.acceptance("8d-1a:sft", "8d-8a")``.

``python docs/acceptance.py`` writes the page; with ``--check`` it only compares. Both refuse a cell that no
test shows and that is not called missing, and a marker that names no cell.
"""

import argparse
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from capabilities import (
    ROOT,
    ShowingTest,
    find_tests,
    render_cells,
    render_tests,
    write_page,
)

DATA = ROOT / "docs" / "acceptance.csv"
PAGE = ROOT / "docs" / "acceptance.md"
COLUMNS = ("id", "group", "part", "recipes", "missing", "note")
RECIPES = ("pretrain", "sft", "two_stage_kl", "latent_edit", "preference")
MARKER = "acceptance"


@dataclass(frozen=True)
class Row:
    """One statement, the recipes that it is about, and those of which no test shows it."""

    id: str
    group: str
    part: str
    recipes: str
    missing: tuple[str, ...]
    note: str

    @property
    def cells(self) -> dict[str, str]:
        """What has to be shown, by the id that tests carry: the recipe, or ``any``."""
        if self.recipes in ("any", "none"):
            return {self.id: "any"} if self.recipes == "any" else {}
        names = RECIPES if self.recipes == "all" else self.recipes.split()
        return {f"{self.id}:{name}": name for name in names}


def read_rows(path: Path) -> list[Row]:
    """All rows of the data file. Raises ValueError for a file with other columns."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path.name}: columns {reader.fieldnames}, expected {COLUMNS}"
            )
        return [Row(**{**one, "missing": tuple(one["missing"].split())}) for one in reader]


def check(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> list[str]:
    """All that is wrong with the table, one sentence each; nothing for a sound one."""
    problems = [
        f"{row_id}: stands {count} times in the table. Give each row an id of its own."
        for row_id, count in Counter(row.id for row in rows).items()
        if count > 1
    ]
    for row in rows:
        problems += _check_row(row, tests)
    known = {cell for row in rows for cell in row.cells}
    for cell in sorted(tests.keys() - known):
        named = f"{tests[cell][0].file}::{tests[cell][0].name}"
        problems.append(f"{cell}: {named} carries it, and the table has no such cell.")
    return problems


def _check_row(row: Row, tests: Mapping[str, Sequence[ShowingTest]]) -> Iterator[str]:
    if not re.fullmatch(r"8d-\d+[a-z]|(number|input)-[A-Za-z0-9-]+", row.id):
        yield f"{row.id!r}: is no id. Write a group with a letter, such as 8d-1a, or number-G-79."
    words = set(row.recipes.split())
    if row.recipes not in ("all", "any", "none") and not (words and words <= set(RECIPES)):
        yield f"{row.id}: {row.recipes!r} are no recipes. Known: all, any, none, {', '.join(RECIPES)}."
    if row.recipes not in ("all", "any") and not row.note:
        yield f"{row.id}: {row.recipes}, without a reason. Fill in `note`."
    if row.missing and not row.note:
        yield f"{row.id}: missing, without a reason. Fill in `note`."
    if unknown := set(row.missing) - set(row.cells.values()):
        yield f"{row.id}: {', '.join(sorted(unknown))} cannot be missing: the row has no such cell."

    for cell, recipe in row.cells.items():
        is_missing = recipe in row.missing
        if not is_missing and cell not in tests:
            yield f"{cell}: no test carries it. Mark the test that shows it, or call it missing."
        if is_missing and cell in tests:
            yield f"{cell}: a test carries it. Take it out of `missing`."


def render(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> str:
    """The page: counts by group, then a table for each group with a line for each cell."""
    groups = list(dict.fromkeys(row.group for row in rows))
    lines = [
        "# Acceptance",
        "",
        "Which test shows which statement, for which recipe: seventeen groups of acceptance tests, the",
        "numbers that five other training systems state, and the input that has to be refused. Generated",
        "by `make generate` from `docs/acceptance.csv` and from the markers of the tests; `make generated`",
        "fails where a cell has no test and is not called missing, and where a test carries a cell that",
        "does not exist. A test that is `long` runs in `make test-long` alone, and of other tests some cases",
        "may. A row for `any` recipe is about what all recipes share. Rows by system and feature:",
        "[capabilities](capabilities.md).",
        "",
        "| group | statements | cells | shown in `make test` | long alone | missing |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for title, found in [
        *((group, [row for row in rows if row.group == group]) for group in groups),
        ("all", list(rows)),
    ]:
        lines.append(_render_counts(title, found, tests))
    for group in groups:
        lines += [
            "",
            f"## {group}",
            "",
            "| id | statement | recipe | tests |",
            "|---|---|---|---|",
        ]
        for row in rows:
            if row.group == group:
                lines += _render_row(row, tests)
    return "\n".join(lines) + "\n"


def _render_counts(
    title: str, rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]
) -> str:
    cells = [cell for row in rows for cell in row.cells]
    shown = [cell for cell in cells if cell in tests]
    at_once = [cell for cell in shown if not all(one.is_long for one in tests[cell])]
    numbers = (
        len(rows),
        len(cells),
        len(at_once),
        len(shown) - len(at_once),
        len(cells) - len(shown),
    )
    return render_cells(title, *map(str, numbers))


def _render_row(row: Row, tests: Mapping[str, Sequence[ShowingTest]]) -> Iterator[str]:
    """A line for each cell; the statement stands in the first alone."""
    statement = f"{row.part}. {row.note}" if row.note else row.part
    if not row.cells:
        yield render_cells(row.id, statement, "does not apply", "")
    for number, (cell, recipe) in enumerate(row.cells.items()):
        shown = render_tests(tests.get(cell, ())) or "**missing**"
        yield render_cells(row.id, "" if number else statement, recipe, shown)


def main() -> int:
    """Write or compare the page; 1 with the problems on stderr where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    rows, tests = read_rows(DATA), find_tests(ROOT / "tests", MARKER)
    problems = check(rows, tests)
    return write_page(PAGE, render(rows, tests), problems, is_check=options.check)


if __name__ == "__main__":
    sys.exit(main())
