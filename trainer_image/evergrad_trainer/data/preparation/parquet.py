"""Reads texts, or rows of several columns, from Parquet files.

A call reads a range of row groups and decodes their rows in batches, which bounds memory. The library
(pyarrow) is an optional dependency, needed only for Parquet files. Its threads are not used, because the
preparing process may fork.
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
"""Types of text columns. Older writers do not mark a column of bytes as text; its values must be UTF-8."""
_READ_AHEAD: Final = 2**18
"""Bytes of a column chunk that are in memory before they are decoded."""


@dataclass(frozen=True)
class RowGroup:
    """The number of rows of a row group, and the uncompressed bytes of the columns that are read."""

    rows: int
    size: int


def read_row_groups(path: Path, column: str, *, field: str) -> list[RowGroup]:
    """Return the row groups of a file of texts, in order.

    ``field``: the path of the source in the manifest. Raises DataError if the file is not a Parquet file, if
    it has no such column of texts, or if pyarrow is not installed.
    """
    with _opened(path) as file:
        kind = _find_column(path, file.schema_arrow, column, field=field)[1]
        # For a dictionary, check the type of its values. Test for index_type, because lists have value_type.
        if hasattr(kind, "index_type"):
            kind = kind.value_type
        if str(kind) not in _TEXTS:
            what = f"its column {column!r} contains values of the type {kind}"
            remedy = f"Name a column of strings in {field}.textField"
            raise DataError(Problem(str(path), what, "a text is a string", remedy))
        return _groups(file.metadata, [column])


def _find_column(
    path: Path, schema: Any, column: str, *, field: str = ""
) -> tuple[list[str], Any]:
    """Return the path to a column as a list of names, and its type.

    ``column`` is the name of a column or, if there is no such column, the path to a field of a structure,
    joined with dots. For example, ``meta.text`` is the field ``text`` of the column ``meta``. Raises
    DataError if there is no such column, or several with the same name.
    """
    names, kind = [column], schema
    if column not in schema.names:
        names = column.split(".")
    for name in names:
        # Only a schema and a structure have fields. A list of structures has several values per row.
        fields = (
            list(kind) if kind is schema or hasattr(kind, "get_all_field_indices") else []
        )
        found = [one.type for one in fields if one.name == name]
        if len(found) > 1:
            what = f"has {len(found)} columns with the name {name!r}"
            why = "cannot determine which of them contains the texts"
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
    """Return the row groups of a file of rows, in order.

    ``columns``: the columns that a row may have. Raises DataError if the file is not a Parquet file, if it
    has none of the columns, or if pyarrow is not installed.
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
    # A column of lists or structures consists of several column chunks, each with a path.
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
    """Yield the texts of some row groups, with their row numbers, which start at ``first_row``."""
    row = first_row
    with _opened(path) as file:
        names, _ = _find_column(path, file.schema_arrow, column)
        for batch in _batches(file, groups, [column]):
            values = _values_of(batch, names)
            try:
                found: list[str | bytes | None] = values.to_pylist()
            except UnicodeDecodeError:
                # If a value is not UTF-8, read all values as bytes and decode them one by one below.
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
    """Return the values of a column of a batch.

    The column is found by its first name, because pyarrow may also return a structure that contains a field
    whose path equals the name of a column.
    """
    values = batch.column(batch.schema.get_field_index(names[0]))
    if len(names) == 1:
        return values
    # Use struct_field, which returns null for the fields of a null structure, even if the file has values.
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
    """Yield the texts that ``render`` returns for the rows of some row groups, with their row numbers.

    A row is a dict with the columns of ``columns`` that have a value in this row. ``render`` raises RowError
    if a row is malformed; such a row is counted in ``tally``.
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
    """Yield the rows of some row groups in batches."""
    found = [file.metadata.row_group(number) for number in groups]
    rows = sum(group.num_rows for group in found)
    size = sum(_size_of(group, columns) for group in found)
    # Choose the number of rows by their mean size: a batch of long texts could be as large as the group.
    wanted = _BATCH_BYTES * rows // max(1, size)
    yield from file.iter_batches(
        batch_size=min(max(1, wanted), _MOST_ROWS),
        row_groups=list(groups),
        columns=list(columns),
        use_threads=False,
    )


def _objects(batch: Any) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of a batch, and None for each row that is not UTF-8."""
    try:
        found: list[dict[str, Any] | None] = batch.to_pylist()
    except UnicodeDecodeError:
        # One invalid value fails the whole batch, so convert the rows one by one to find the invalid rows.
        found = []
        for index in range(batch.num_rows):
            try:
                found += batch.slice(index, 1).to_pylist()
            except UnicodeDecodeError:
                found.append(None)
    # In Parquet, each row has all columns and each structure all fields. Treat a null value as a missing key,
    # so that a file may contain both conversations and prompts.
    for one in found:
        try:
            yield None if one is None else _without_nulls(one)
        except UnicodeDecodeError:
            yield None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, bytes):
        # Decode texts of writers that do not mark a column of bytes as text.
        return value.decode()
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def _text_of(value: str | bytes | None, row: int, column: str, tally: LineCounts) -> str:
    """Return the text of a row, or "". Rows without a text are counted in ``tally``."""
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
            row, f"the column {column!r} contains null", "a text is a string"
        )
        tally.pass_over(problem, SkipReason.NO_TEXT)
        return ""
    if not value:
        tally.skipped[SkipReason.EMPTY_TEXT] += 1
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file with pyarrow. Raises DataError if the format is invalid, and OSError if the disk fails."""
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
            # Errors of pyarrow are OSErrors too, but without an errno.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            reason = " ".join(str(error).split())[:300]
            what = "cannot be read as a Parquet file"
            remedy = (
                "Check that it is one, and copy it again if it was cut short or damaged"
            )
            raise DataError(Problem(str(path), what, reason.rstrip("."), remedy)) from error
