"""Reads texts, or rows of several columns, from Parquet files, some row groups at a time.

Memory is bounded: rows are decoded some at a time.

The library (pyarrow) is an extra: only who has such files needs it. No thread of it is used, since processes
fork from the one that prepares.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.documents import (
    LineCounts,
    LineProblem,
    RowError,
    SkipReason,
)

_BATCH_BYTES: Final = 2**20
_MOST_ROWS: Final = 4096
_TEXTS: Final = (
    *("string", "large_string", "string_view"),
    *("binary", "large_binary", "binary_view"),
)
"""Types of texts. Older writers do not mark a column of bytes as text; it has to be UTF-8."""
_READ_AHEAD: Final = 2**18
"""Bytes of a column's part that are in memory before they are decoded."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of a group, and bytes of what is read of it before compression."""

    rows: int
    size: int


def read_row_groups(path: Path, column: str, *, field: str) -> list[RowGroup]:
    """The row groups of a file, in their order.

    ``field``: the path of the source in the manifest. Raises DataError for a file that is none or has no such
    column of texts, and where pyarrow is not installed.
    """
    with _opened(path) as file:
        kind = _find_column(path, file.schema_arrow, column, field=field)[1]
        # A list, too, has a type of its values.
        if hasattr(kind, "index_type"):
            kind = kind.value_type
        if str(kind) not in _TEXTS:
            what = f"its column {column!r} holds values of the type {kind}"
            remedy = f"Name a column of strings in {field}.textField"
            raise DataError(Problem(str(path), what, "a text is a string", remedy))
        return _groups(file.metadata, [column])


def _find_column(
    path: Path, schema: Any, column: str, *, field: str = ""
) -> tuple[list[str], Any]:
    """The names that lead to a column, and its type: a column of that name, or else a field of a structure,
    whose path is joined with dots. Raises DataError for none, and for several of one name."""
    names, kind = [column], schema
    if column not in schema.names:
        names = column.split(".")
    for name in names:
        # Only a schema and a structure have fields; a list of structures has one value of many.
        fields = (
            list(kind) if kind is schema or hasattr(kind, "get_all_field_indices") else []
        )
        found = [one.type for one in fields if one.name == name]
        if len(found) > 1:
            what = f"has {len(found)} columns with the name {name!r}"
            why = "which of them holds the texts cannot be known"
            raise DataError(
                Problem(str(path), what, why, "Write the file with different names")
            )
        if not found:
            known = list(schema.names)
            shown = ", ".join(map(repr, known[:5])) + (", …" if len(known) > 5 else "")
            what = f"has no column {column!r}"
            remedy = f"Name the column of texts in {field}.textField"
            raise DataError(Problem(str(path), what, f"it has {shown or 'none'}", remedy))
        (kind,) = found
    return names, kind


def find_row_groups(path: Path, columns: Sequence[str]) -> list[RowGroup]:
    """The row groups of a file of rows, in their order.

    ``columns``: those that a row may have. Raises DataError for a file that is none or has none of them, and
    where pyarrow is not installed.
    """
    with _opened(path) as file:
        names = list(file.schema_arrow.names)
        if not set(columns) & set(names):
            shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            what = f"has none of the columns {', '.join(map(repr, columns))}"
            remedy = "Name its columns under spec.training.rows"
            raise DataError(Problem(str(path), what, f"it has {shown or 'none'}", remedy))
        for column in columns:
            if column in names:
                _find_column(path, file.schema_arrow, column)
        return _groups(file.metadata, columns)


def _groups(metadata: Any, columns: Collection[str]) -> list[RowGroup]:
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [RowGroup(group.num_rows, _size_of(group, columns)) for group in groups]


def _size_of(group: Any, columns: Collection[str]) -> int:
    # A column of lists or structures has several parts, each with a path.
    parts = map(group.column, range(group.num_columns))
    return sum(
        part.total_uncompressed_size
        for part in parts
        if part.path_in_schema.partition(".")[0] in columns
        or part.path_in_schema in columns
    )


def read_rows(
    path: Path, groups: range, column: str, *, first_row: int, tally: LineCounts
) -> Iterator[tuple[list[str], list[int]]]:
    """The texts of some row groups, and the row of each. ``first_row``: number of their first one."""
    row = first_row
    with _opened(path) as file:
        names, _ = _find_column(path, file.schema_arrow, column)
        for batch in _batches(file, groups, [column]):
            values = _values_of(batch, names)
            try:
                found: list[str | bytes | None] = values.to_pylist()
            except UnicodeDecodeError:
                # All of them as bytes, where one is no UTF-8: which one shows as each is decoded.
                if hasattr(values, "dictionary_decode"):
                    values = values.dictionary_decode()
                found = values.cast("large_binary").to_pylist()
            texts, lines = [], []
            for number, value in enumerate(found, row):
                text = _text_of(value, number, column, tally)
                if text:
                    texts.append(text)
                    lines.append(number)
            row += batch.num_rows
            yield texts, lines


def _values_of(batch: Any, names: Sequence[str]) -> Any:
    """The values of a column of a batch. The library also gives a structure whose field has the path that is
    the name of a column."""
    values = batch.column(batch.schema.get_field_index(names[0]))
    if len(names) == 1:
        return values
    # A structure that is null has no values in its fields, whatever the file holds there.
    compute: Any = importlib.import_module("pyarrow.compute")
    return compute.struct_field(values, list(names[1:]))


def read_objects(
    path: Path,
    groups: range,
    columns: Sequence[str],
    *,
    first_row: int,
    tally: LineCounts,
    render: Callable[[dict[str, Any]], str],
) -> Iterator[tuple[list[str], list[int]]]:
    """The texts that ``render`` makes of the rows of some row groups, and the row of each.

    A row is an object of those of ``columns`` that have a value in it. ``render`` raises RowError.
    """
    row = first_row
    with _opened(path) as file:
        present = [name for name in columns if name in file.schema_arrow.names]
        for batch in _batches(file, groups, present):
            texts, lines = [], []
            for number, value in enumerate(_objects(batch), row):
                if value is None:
                    why = "a byte in it starts no character"
                    problem = LineProblem(number, "the row is not UTF-8", why)
                    tally.pass_over(problem, SkipReason.NOT_UTF8)
                    continue
                try:
                    texts.append(render(value))
                except RowError as error:
                    problem = LineProblem(number, error.what, error.why)
                    tally.pass_over(problem, SkipReason.NO_ROW)
                    continue
                lines.append(number)
            row += batch.num_rows
            yield texts, lines


def _batches(file: Any, groups: range, columns: Sequence[str]) -> Iterator[Any]:
    """The rows of some row groups, some at a time."""
    found = [file.metadata.row_group(number) for number in groups]
    rows = sum(group.num_rows for group in found)
    size = sum(_size_of(group, columns) for group in found)
    # By their mean length: a batch of long texts would otherwise be as large as the group.
    wanted = _BATCH_BYTES * rows // max(1, size)
    yield from file.iter_batches(
        batch_size=min(max(1, wanted), _MOST_ROWS),
        row_groups=list(groups),
        columns=list(columns),
        use_threads=False,
    )


def _objects(batch: Any) -> Iterator[dict[str, Any] | None]:
    """The rows of a batch; None for one that is no UTF-8."""
    try:
        found: list[dict[str, Any] | None] = batch.to_pylist()
    except UnicodeDecodeError:
        # One such value fails the whole batch: each row by itself shows which of them have one.
        found = []
        for index in range(batch.num_rows):
            try:
                found += batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                found.append(None)
    # Each row has all columns, and each structure all its fields: one without a value is as if it were not
    # there, so that a file may hold conversations and prompts.
    for one in found:
        try:
            yield None if one is None else _without_nulls(one)
        except UnicodeDecodeError:
            yield None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, bytes):
        # Texts of a writer that does not mark them as such.
        return value.decode()
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _text_of(value: str | bytes | None, row: int, column: str, tally: LineCounts) -> str:
    """The text of a row, or "" if it has none."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            why = "a byte in it starts no character"
            problem = LineProblem(row, f"the column {column!r} is not UTF-8", why)
            tally.pass_over(problem, SkipReason.NOT_UTF8)
            return ""
    if value is None:
        problem = LineProblem(
            row, f"the column {column!r} holds null", "a text is a string"
        )
        tally.pass_over(problem, SkipReason.NO_TEXT)
        return ""
    if not value:
        tally.skipped[SkipReason.EMPTY_TEXT] += 1
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as pyarrow reads it. Errors of its format become a DataError, those of the disk stay."""
    try:
        library: Any = importlib.import_module("pyarrow.parquet")
        arrow_error: type[Exception] = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        what, why = "cannot be read here", "the package pyarrow is not installed"
        remedy = "Run `pip install pyarrow`, or convert the file to JSON Lines"
        raise DataError(Problem(str(path), what, why, remedy)) from None
    with path.open("rb") as raw:
        try:
            yield library.ParquetFile(raw, pre_buffer=False, buffer_size=_READ_AHEAD)
        except (arrow_error, OSError) as error:
            # Its own errors are OSErrors, too, without a number.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = " ".join(str(error).split())[:300]
            what = "cannot be read as a Parquet file"
            remedy = (
                "Check that it is one, and copy it again if it was cut short or damaged"
            )
            raise DataError(Problem(str(path), what, reason.rstrip("."), remedy)) from error
