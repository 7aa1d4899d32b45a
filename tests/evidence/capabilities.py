"""The table of capabilities: what a user of five other training systems finds here, and the tests that show it.

A row's state is ``works``, ``partial``, ``missing``, ``refused`` (with its reason) or ``n/a`` (with its
reason). ``where`` names what a user writes: fields of the file, commands, make targets, pages, examples,
metrics and Python names, separated by ``;``. The tests of a row are not listed in the data file: they carry
the row's id, ``@pytest.mark.capability("G-1")``.

``check`` refuses a table that names something that does not exist, or that calls a row ``works`` although no
test shows it.
"""

import argparse
import ast
import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from evergrad_cli.main import build_whole_parser
from evergrad_common import metrics
from evergrad_manifest.envelope import TrainingRun
from evergrad_manifest.model.fields import find_field

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "evidence" / "capabilities.csv"
COLUMNS = ("id", "system", "capability", "state", "where", "note")
STATES = ("works", "partial", "missing", "refused", "n/a")
MARKER = "capability"
_PACKAGES = (
    "common",
    "coordinator",
    "manifest",
    "operator",
    "cli",
    "trainer_image",
    "latent_edit",
)


@dataclass(frozen=True)
class Row:
    """One capability of one system, and its counterpart in Evergrad."""

    id: str
    system: str
    capability: str
    state: str
    where: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class ShowingTest:
    """A test that carries row ids: its file, from the root, and its name."""

    file: str
    name: str


def read_rows(path: Path) -> list[Row]:
    """Return all rows of the data file. Raises ValueError for a file with other columns."""
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
    """Return tests by the row ids that they carry, from their decorators or from their module's
    ``pytestmark``.

    The sources are parsed and not imported, because some tests need packages or machines that are not
    available here.
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
            test = ShowingTest(where, node.name)
            for call in (one for mark in marks for one in ast.walk(mark)):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(
                    f"mark.{marker}"
                ):
                    for one in call.args:
                        found.setdefault(ast.literal_eval(one), []).append(test)
    return found


def check(rows: Sequence[Row], tests: Mapping[str, Sequence[ShowingTest]]) -> list[str]:
    """Return all problems of the table, one sentence each; empty for a valid table."""
    ids = [row.id for row in rows]
    problems = find_repeated(ids)
    for row in rows:
        problems += _check_row(row, tests.get(row.id, ()))
    return [*problems, *find_unknown(ids, tests, "row")]


def find_repeated(ids: Sequence[str]) -> list[str]:
    """Return a problem for each id that several rows have."""
    return [
        f"{row_id}: stands {count} times in the table. Give each row an id of its own."
        for row_id, count in Counter(ids).items()
        if count > 1
    ]


def find_unknown(
    known: Iterable[str], tests: Mapping[str, Sequence[ShowingTest]], word: str
) -> list[str]:
    """Return a problem for each id that a test carries and the table lacks. ``word``: what the id denotes."""
    return [
        f"{one}: {tests[one][0].file}::{tests[one][0].name} carries it, and the table has no such {word}."
        for one in sorted(tests.keys() - set(known))
    ]


def _check_row(row: Row, tests: Sequence[ShowingTest]) -> Iterator[str]:
    if not re.fullmatch(r"[A-Z][A-Za-z]*-[A-Z]?\d+", row.id):
        yield f"{row.id!r}: is no id. Write the system's letter and a number, such as G-1."
    if row.state not in STATES:
        yield f"{row.id}: {row.state!r} is no state. Known: {', '.join(STATES)}."

    # A row that works is named and shown by a test; any other row has its reason.
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
    """Return why a name in ``where`` refers to nothing, or None if it exists.

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
    """Return why a command or one of its options does not exist, or None."""
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
    """Return why a Python name does not exist, or None. It is read from the source, because some modules
    import packages that are not installed everywhere."""
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
    """Return the names that a statement defines or imports."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Assign):
        return {ast.unparse(one) for one in statement.targets}
    if isinstance(statement, ast.AnnAssign):
        return {ast.unparse(statement.target)}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {one.asname or one.name for one in statement.names}
    return set()
