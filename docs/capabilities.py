"""Writes docs/capabilities.md from docs/capabilities.csv and the tests that show each capability.

The table says what a user of five other training systems finds here. A row's state is ``works``, ``partial``,
``missing``, ``refused`` (with its reason) or ``n/a`` (with its reason). ``where`` names what a user writes:
fields of the file, commands, make targets, pages, examples, metrics and Python names, separated by ``;``. The
tests of a row are not listed in the data file: they carry the row's id, ``@pytest.mark.capability("G-1")``.

``python docs/capabilities.py`` writes the page; with ``--check`` it only compares. Both refuse a table that
names what does not exist, or that calls works what no test shows.
"""

import argparse
import ast
import csv
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evergrad_cli.main import build_whole_parser
from evergrad_coordinator import metrics
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.fields import find_field

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs" / "capabilities.csv"
PAGE = ROOT / "docs" / "capabilities.md"
COLUMNS = ("id", "system", "capability", "state", "where", "note")
STATES = ("works", "partial", "missing", "refused", "n/a")
MARKER = "capability"
_PACKAGES = ("coordinator", "manifest", "operator", "cli", "trainer_image")


@dataclass(frozen=True)
class Row:
    """One capability of one system, and what stands for it here."""

    id: str
    system: str
    capability: str
    state: str
    where: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class ShowingTest:
    """A test that carries ids of rows: its file, from the root, and its name."""

    file: str
    name: str
    is_long: bool = False
    """All of its cases run in ``make test-long`` alone."""


def read_rows(path: Path) -> list[Row]:
    """All rows of the data file. Raises ValueError for a file with other columns."""
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise ValueError(
                f"{path.name}: columns {reader.fieldnames}, expected {COLUMNS}"
            )
        return [
            Row(
                id=one["id"],
                system=one["system"],
                capability=one["capability"],
                state=one["state"],
                where=tuple(
                    part.strip() for part in one["where"].split(";") if part.strip()
                ),
                note=one["note"],
            )
            for one in reader
        ]


def find_tests(folder: Path, marker: str = MARKER) -> dict[str, list[ShowingTest]]:
    """Tests by the row ids that they carry, from their decorators or from their module's ``pytestmark``.

    The sources are parsed and not imported: some tests need packages or machines that are not here.
    """
    found: dict[str, list[ShowingTest]] = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if f"mark.{marker}" not in text:
            continue
        module = ast.parse(text)
        where = path.relative_to(folder.parent).as_posix()
        of_module = [
            one
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for one in (
                node.value.elts if isinstance(node.value, ast.List) else [node.value]
            )
        ]
        for node in ast.walk(module):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if not is_function or not node.name.startswith("test_"):
                continue
            marks = [*of_module, *node.decorator_list]
            is_long = any(ast.unparse(mark) == "pytest.mark.long" for mark in marks)
            test = ShowingTest(where, node.name, is_long)
            for call in (one for mark in marks for one in ast.walk(mark)):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(
                    f"mark.{marker}"
                ):
                    for one in call.args:
                        found.setdefault(ast.literal_eval(one), []).append(test)
    return found


def check(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> list[str]:
    """All that is wrong with the table, one sentence each; nothing for a sound one."""
    problems = [
        f"{row_id}: stands {count} times in the table. Give each row an id of its own."
        for row_id, count in Counter(row.id for row in rows).items()
        if count > 1
    ]
    for row in rows:
        problems += _check_row(row, tests.get(row.id, ()))
    known = {row.id for row in rows}
    for row_id in sorted(tests.keys() - known):
        named = f"{tests[row_id][0].file}::{tests[row_id][0].name}"
        problems.append(f"{row_id}: {named} carries it, and the table has no such row.")
    return problems


def _check_row(row: Row, tests: Sequence[ShowingTest]) -> Iterator[str]:
    if not re.fullmatch(r"[A-Z][A-Za-z]*-[A-Z]?\d+", row.id):
        yield f"{row.id!r}: is no id. Write the system's letter and a number, such as G-1."
    if row.state not in STATES:
        yield f"{row.id}: {row.state!r} is no state. Known: {', '.join(STATES)}."

    # What works is named and shown; what does not has its reason.
    if row.state == "works" and not row.where:
        yield f"{row.id}: works, but no field or command is named. Fill in `where`."
    if row.state in ("works", "refused") and not tests:
        yield f"{row.id}: {row.state}, but no test carries it. Mark the test that shows it."
    if row.state in STATES[1:] and not row.note:
        yield f"{row.id}: {row.state}, without a reason. Fill in `note`."

    for name in row.where:
        if (problem := find_fault(name)) is not None:
            yield f"{row.id}: {name}: {problem}."


def find_fault(name: str) -> str | None:
    """Why a name that ``where`` holds leads nowhere, or None where it exists.

    ``spec.…`` and ``metadata.…`` are fields of the file, ``evergrad …`` and ``make …`` commands,
    ``evergrad_x.y:Name`` a Python name, ``evergrad_…`` and ``column …`` metrics; anything else is a path.
    """
    if name.startswith(("spec.", "metadata.")):
        path = tuple(part for part in re.split(r"\.|\[\]", name) if part)
        return None if find_field(TrainingRun, path) else "the file has no such field"
    if name.startswith("evergrad "):
        return _fault_of_command(name.split()[1:])
    if name.startswith("make "):
        targets = re.findall(
            r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M
        )
        return None if name.split()[1] in targets else "the Makefile has no such target"
    if name.startswith("column "):
        is_known = name.removeprefix("column ") in {one.name for one in metrics.COLUMNS}
        return None if is_known else "metrics.jsonl has no such column"
    if re.fullmatch(r"evergrad_\w+(\.\w+)*:\w+(\.\w+)*", name):
        return _fault_of_object(*name.split(":"))
    if re.fullmatch(r"evergrad_[a-z0-9_]+", name):
        series = (*metrics.TRAINER, *metrics.NODE, *metrics.COORDINATOR, *metrics.OPERATOR)
        is_known = name in {one.exported for one in series}
        return None if is_known else "the catalogue has no such metric"
    return None if (ROOT / name).exists() else "there is no such file"


def _fault_of_command(words: Sequence[str]) -> str | None:
    """A command, and each of its options."""
    parsers = _parsers()
    parser = parsers.get(words[0])
    if parser is None:
        return f"there is no such command. Known: {', '.join(parsers)}"
    options = {text for action in parser._actions for text in action.option_strings}
    missing = [word for word in words[1:] if word.startswith("-") and word not in options]
    return f"the command has no option {missing[0]}" if missing else None


@cache
def _parsers() -> Mapping[str, argparse.ArgumentParser]:
    choices = next(
        action.choices
        for action in build_whole_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(choices)


def _fault_of_object(module: str, attribute: str) -> str | None:
    """A Python name: read from the source, since some modules import what is not installed everywhere."""
    relative = module.replace(".", "/")
    candidates = (
        ROOT / package / f"{relative}{ending}"
        for package in _PACKAGES
        for ending in (".py", "/__init__.py")
    )
    file = next((one for one in candidates if one.exists()), None)
    if file is None:
        return "there is no such module"
    body: Sequence[ast.stmt] = ast.parse(file.read_text(encoding="utf-8")).body
    for part in attribute.split("."):
        found = next((one for one in body if part in _names_of(one)), None)
        if found is None:
            return f"the module has no {attribute}"
        body = found.body if isinstance(found, ast.ClassDef) else ()
    return None


def _names_of(statement: ast.stmt) -> set[str]:
    """Names that a statement defines or imports."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {ast.unparse(one) for one in statement.targets}
    if isinstance(statement, ast.AnnAssign):
        return {ast.unparse(statement.target)}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {one.asname or one.name for one in statement.names}
    return set()


def render(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> str:
    """The page: counts by system and state, then a table for each system."""
    systems = list(dict.fromkeys(row.system for row in rows))
    lines = [
        "# Capabilities of five training systems",
        "",
        "A user of another training system finds this here. Generated by `make generate` from",
        "`docs/capabilities.csv` and from the markers of the tests; `make generated` checks that each named",
        "field, command and file exists and that a test shows each row that works.",
        "",
        f"| system | {' | '.join(STATES)} | rows |",
        f"|---|{'---:|' * (len(STATES) + 1)}",
    ]
    for title, found in [
        *((system, [row for row in rows if row.system == system]) for system in systems),
        ("all", list(rows)),
    ]:
        counts = Counter(row.state for row in found)
        numbers = " | ".join(str(counts[state]) for state in STATES)
        lines.append(f"| {title} | {numbers} | {len(found)} |")
    for system in systems:
        lines += ["", f"## {system}", "", "| id | capability | state | here | tests |"]
        lines.append("|---|---|---|---|---|")
        lines += [
            _render_row(row, tests.get(row.id, ())) for row in rows if row.system == system
        ]
    return "\n".join(lines) + "\n"


def _render_row(row: Row, tests: Sequence[ShowingTest]) -> str:
    here = ", ".join(f"`{name}`" for name in row.where)
    text = ". ".join(part for part in (here, row.note) if part)
    return render_cells(row.id, row.capability, row.state, text, render_tests(tests))


def render_tests(tests: Sequence[ShowingTest]) -> str:
    """Tests as one cell of a table."""
    return "<br>".join(
        f"{one.file.removeprefix('tests/')}: {one.name}{' (long)' if one.is_long else ''}"
        for one in tests
    )


def render_cells(*cells: str) -> str:
    """One row of a table."""
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> int:
    """Write or compare the page; 1 with the problems on stderr where something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    options = parser.parse_args()
    rows, tests = read_rows(DATA), find_tests(ROOT / "tests")
    problems = check(rows, tests)
    return write_page(PAGE, render(rows, tests), problems, is_check=options.check)


def write_page(path: Path, page: str, problems: list[str], *, is_check: bool) -> int:
    """Write or compare a generated page; the exit code, with problems on stderr where something is wrong."""
    if is_check and (not path.exists() or path.read_text(encoding="utf-8") != page):
        problems = [
            *problems,
            f"{path.relative_to(ROOT)}: out of date. Run `make generate`.",
        ]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems and not is_check:
        path.write_text(page, encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
