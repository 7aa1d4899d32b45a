"""The table of acceptance: statements that are promised for some or all recipes, and the tests that show them.

Each row is one statement: a part of a group of acceptance tests, a number that the documentation of another
system states, or input that must be refused. ``recipes`` names the recipes that need a test: ``all``, some by
their names, ``any`` (one test is enough, because all recipes share it) or ``none`` (it does not apply). If a
row leaves a recipe out, ``note`` has the reason. ``missing`` names the recipes, or ``any``, that no test shows.

Tests carry cells, with the recipe if the row has recipes: ``@pytest.mark.acceptance("8d-1a:sft", "8d-8a")``.

``check`` refuses a cell that no test shows and that is not listed as missing, and a marker without a cell.
"""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from evidence.capabilities import ROOT, ShowingTest, find_repeated, find_unknown

DATA = ROOT / "tests" / "evidence" / "acceptance.csv"
COLUMNS = ("id", "group", "part", "recipes", "missing", "note")
RECIPES = ("pretrain", "sft", "two_stage_kl", "latent_edit", "preference")
MARKER = "acceptance"


@dataclass(frozen=True)
class Row:
    """One statement, the recipes that it applies to, and the recipes for which no test shows it."""

    id: str
    group: str
    part: str
    recipes: str
    missing: tuple[str, ...]
    note: str

    @property
    def cells(self) -> dict[str, str]:
        """Return what must be shown, by the id in the test markers: the recipe, or ``any``."""
        if self.recipes in ("any", "none"):
            return {self.id: "any"} if self.recipes == "any" else {}
        names = RECIPES if self.recipes == "all" else self.recipes.split()
        return {f"{self.id}:{name}": name for name in names}


def read_rows(path: Path) -> list[Row]:
    """Return all rows of the data file. Raises ValueError for a file with other columns."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path.name}: columns {reader.fieldnames}, expected {COLUMNS}"
            )
        return [Row(**{**one, "missing": tuple(one["missing"].split())}) for one in reader]


def check(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> list[str]:
    """Return all problems of the table, one sentence each; empty for a valid table."""
    problems = find_repeated([row.id for row in rows])
    for row in rows:
        problems += _check_row(row, tests)
    cells = (cell for row in rows for cell in row.cells)
    return [*problems, *find_unknown(cells, tests, "cell")]


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
