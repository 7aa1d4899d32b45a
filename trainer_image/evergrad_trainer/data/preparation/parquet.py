"""Reads a column of texts from Parquet files, some row groups at a time and with bounded memory.

The library (pyarrow) is an extra: only who has such files needs it. No thread of it is used, since processes
fork from the one that prepares.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.data.preparation.documents import LineProblem, Reason, Tally
from evergrad_trainer.errors import DataError

_BATCH_BYTES: Final = 2**20
_MOST_ROWS: Final = 4096
_READ_AHEAD: Final = 2**18
"""Bytes of a column's part that are in memory before they are decoded."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of a group, and bytes of its texts before compression."""

    rows: int
    size: int


def read_row_groups(path: Path, column: str, *, field: str) -> list[RowGroup]:
    """The row groups of a file, in their order.

    ``field``: the path of the source in the manifest. Raises DataError for a file that is none or has no such
    column of texts, and where pyarrow is not installed.
    """
    with _opened(path) as file:
        schema = file.schema_arrow
        names = list(schema.names)
        if column not in names:
            shown = ", ".join(map(repr, names[:5])) + (", …" if len(names) > 5 else "")
            what = f"has no column {column!r}"
            remedy = f"Name the column of texts in {field}.textField"
            raise DataError(Problem(str(path), what, f"it has {shown or 'none'}", remedy))
        kind = schema.field(column).type
        # A list, too, has a type of its values.
        if hasattr(kind, "index_type"):
            kind = kind.value_type
        if str(kind) not in ("string", "large_string", "string_view"):
            what = f"its column {column!r} holds values of the type {kind}"
            remedy = f"Name a column of strings in {field}.textField"
            raise DataError(Problem(str(path), what, "a text is a string", remedy))
        metadata = file.metadata
        groups = []
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            groups.append(RowGroup(group.num_rows, _size_of(group, column)))
        return groups


def _size_of(group: Any, column: str) -> int:
    parts = map(group.column, range(group.num_columns))
    return sum(part.total_uncompressed_size for part in parts if part.path_in_schema == column)


def read_rows(
    path: Path, groups: range, column: str, *, first_row: int, tally: Tally
) -> Iterator[tuple[list[str], list[int]]]:
    """The texts of some row groups, and the row of each. ``first_row``: number of their first one."""
    numbers, row = list(groups), first_row
    with _opened(path) as file:
        found = [file.metadata.row_group(number) for number in numbers]
        rows = sum(group.num_rows for group in found)
        size = sum(_size_of(group, column) for group in found)
        # By their mean length: a batch of long texts would otherwise be as large as the group.
        wanted = _BATCH_BYTES * rows // max(1, size)
        batches = file.iter_batches(
            batch_size=min(max(1, wanted), _MOST_ROWS),
            row_groups=numbers,
            columns=[column],
            use_threads=False,
        )
        for batch in batches:
            texts, lines = [], []
            for number, value in enumerate(_values(batch.column(0)), row):
                text = _text_of(value, number, column, tally)
                if text:
                    texts.append(text)
                    lines.append(number)
            row += batch.num_rows
            yield texts, lines


def _values(column: Any) -> list[str | bytes | None]:
    """The values of a column; all as bytes where one of them is no UTF-8."""
    try:
        values: list[str | bytes | None] = column.to_pylist()
    except UnicodeDecodeError:
        if hasattr(column, "dictionary_decode"):
            column = column.dictionary_decode()
        values = column.cast("large_binary").to_pylist()
    return values


def _text_of(value: str | bytes | None, row: int, column: str, tally: Tally) -> str:
    """The text of a row, or "" if it has none."""
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError:
            why = "a byte in it starts no character"
            problem = LineProblem(row, f"the column {column!r} is not UTF-8", why)
            tally.pass_over(problem, Reason.NOT_UTF8)
            return ""
    if value is None:
        problem = LineProblem(row, f"the column {column!r} holds null", "a text is a string")
        tally.pass_over(problem, Reason.NO_TEXT)
        return ""
    if not value:
        tally.skipped[Reason.EMPTY_TEXT] += 1
    return value


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """The file as pyarrow reads it. Errors of its format become a DataError, those of the disk stay."""
    try:
        library: Any = importlib.import_module("pyarrow.parquet")
        arrow_error: type[Exception] = importlib.import_module("pyarrow").ArrowException
    except ImportError:
        what, why = "cannot be read here", "the package pyarrow is not installed"
        remedy = "Install evergrad-trainer[parquet], or convert the file to JSON Lines"
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
            remedy = "Check that it is one, and copy it again if it was cut short or damaged"
            raise DataError(Problem(str(path), what, reason.rstrip("."), remedy)) from error
