"""Reads the edits of a corpus: tables of population and clinical variants, in Parquet or JSON Lines."""

import importlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from evergrad_latent_edit.corpus import TRAIN, CorpusFile
from evergrad_latent_edit.edits import Edit, EditError, EditType, type_of
from evergrad_latent_edit.windows import HoldOutPolicy
from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.errors import DataError

LEAST_FREQUENCY: Final = 0.01
"""Frequency of a population variant: rarer ones are no common variants."""
SIGNIFICANCES: Final = ("P", "LP", "LB", "B", "VUS", "OTHER")
_KEY_COLUMNS: Final = ("chrom", "pos", "ref", "alt")
_COLUMNS: Final = {
    "population": (*_KEY_COLUMNS, "af_global", "filter"),
    "clinical": (*_KEY_COLUMNS, "clinical_significance"),
}
_MOST_PROBLEMS: Final = 20
_ROWS_AT_A_TIME: Final = 4096


@dataclass
class EditTable:
    """The edits of one family for one split. ``passed_over``: rows that the rules of the family leave out,
    by reason."""

    edits: dict[str, Edit] = field(default_factory=dict)
    passed_over: Counter[str] = field(default_factory=Counter)


def read_tables(
    files: Sequence[CorpusFile], family: str, *, split: str, policy: HoldOutPolicy | None
) -> EditTable:
    """The edits of ``family`` that windows of ``split`` may have.

    ``policy``: what is held out of them. A file without a split is for all. Raises DataError with all that is
    wrong in the rows.
    """
    table = EditTable()
    problems: list[Problem] = []
    for file in files:
        own = TRAIN if file.is_train else file.split
        if file.split is not None and own != split:
            continue
        count, known = 0, len(problems)
        for number, row in _read_rows(file, _COLUMNS[family]):
            count += 1
            place = f"{file.name}:{number}"
            if isinstance(row, Problem):
                problems.append(row)
            elif reason := _judge(row, family):
                table.passed_over[reason] += 1
            elif problem := _take(row, place, family, table, policy):
                problems.append(problem)
            if len(problems) >= _MOST_PROBLEMS:
                raise DataError(*problems)
        if file.records is not None and count != file.records and len(problems) == known:
            what, why = f"has {count} rows", f"the corpus's manifest says {file.records}"
            problems.append(Problem(str(file.path), what, why, "Make the manifest anew"))
    raise_if(problems, DataError)
    return table


def _judge(row: Mapping[str, Any], family: str) -> str:
    """Why a row is passed over by its family's rule; empty for one that counts."""
    reference, alternate = row.get("ref"), row.get("alt")
    are_texts = isinstance(reference, str) and isinstance(alternate, str)
    if are_texts and type_of(str(reference), str(alternate)) == EditType.STRUCTURAL:
        return "longAllele"
    if family != "population":
        return ""
    if row.get("filter") != "PASS":
        return "filter"
    frequency = row.get("af_global")
    is_common = isinstance(frequency, int | float) and frequency >= LEAST_FREQUENCY
    return "" if is_common else "rare"


def _take(
    row: Mapping[str, Any],
    place: str,
    family: str,
    table: EditTable,
    policy: HoldOutPolicy | None,
) -> Problem | None:
    """Add the edit of a row, or say what is wrong with it."""
    chromosome, position, reference, alternate = (row.get(key) for key in _KEY_COLUMNS)
    is_typed = isinstance(position, int) and not isinstance(position, bool)
    texts = (chromosome, reference, alternate)
    if not is_typed or not all(isinstance(one, str) and one for one in texts):
        why = "an edit has the texts chrom, ref and alt, and the whole number pos"
        return Problem(place, "is not an edit", why, "Correct the row")
    edit = Edit(str(chromosome), int(position or 0), str(reference), str(alternate))
    try:
        edit.check()
    except EditError as error:
        return Problem(place, str(error), "positions count from 1", "Correct the row")
    if family == "clinical":
        significance = row.get("clinical_significance")
        if significance not in SIGNIFICANCES:
            what = f"clinical_significance is {str(significance)[:40]!r}"
            why = f"it is one of {', '.join(SIGNIFICANCES)}"
            return Problem(place, what, why, "Correct the row, or write OTHER")
    if policy is not None and policy.meets_edit(edit):
        table.passed_over["heldOut"] += 1
    elif edit.key in table.edits:
        table.passed_over["repeated"] += 1
    else:
        table.edits[edit.key] = edit
    return None


def _read_rows(
    file: CorpusFile, columns: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Any] | Problem]]:
    """Each row of a table with its number, from 1."""
    if file.path.suffix == ".parquet":
        yield from _read_parquet(file, columns)
    elif file.path.suffix == ".jsonl":
        with file.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                place = f"{file.name}:{number}"
                try:
                    row: Any = json.loads(line)
                except ValueError as error:
                    row = Problem(place, "is no JSON", str(error), "Correct it")
                if not isinstance(row, Mapping | Problem):
                    why = "each line is one edit"
                    row = Problem(place, "holds no object", why, "Correct it")
                yield number, row
    else:
        why = "tables of edits end in .parquet or .jsonl"
        raise DataError(
            Problem(str(file.path), "is no table of edits", why, "Convert it, or move it")
        )


def _read_parquet(
    file: CorpusFile, columns: Sequence[str]
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    path = str(file.path)
    try:
        library: Any = importlib.import_module("pyarrow.parquet")
        arrow_error: type[Exception] = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        what, why = "cannot be read here", "the package pyarrow is not installed"
        remedy = "Run `pip install pyarrow`, or convert the table to JSON Lines"
        raise DataError(Problem(path, what, why, remedy)) from None
    number = 0
    with file.path.open("rb") as raw:
        try:
            table = library.ParquetFile(raw, pre_buffer=False)
            if missing := [one for one in columns if one not in table.schema_arrow.names]:
                what = f"has no column {', '.join(missing)}"
                why = f"a row has {', '.join(columns)}"
                raise DataError(Problem(path, what, why, "Add it"))
            # Without its threads: processes are forked from this one.
            for batch in table.iter_batches(
                _ROWS_AT_A_TIME, columns=columns, use_threads=False
            ):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (arrow_error, UnicodeDecodeError) as error:
            reason = " ".join(str(error).split())[:200]
            remedy = "Check that it is a Parquet file, and whole"
            raise DataError(Problem(path, "cannot be read", reason, remedy)) from error
