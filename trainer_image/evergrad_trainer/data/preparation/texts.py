"""Reads the texts of a chunk, whatever its source has: lines of JSON, plain lines, whole files, rows."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from io import RawIOBase
from pathlib import Path
from typing import Any, Final, Literal

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.content import Chunk
from evergrad_trainer.data.preparation.documents import (
    DocumentReader,
    LineCounts,
    LineProblem,
    SkipReason,
    read_blocks,
)
from evergrad_trainer.data.preparation.files import SourceEntry
from evergrad_trainer.data.preparation.pairs import PairFormat, read_format
from evergrad_trainer.data.preparation.parquet import read_objects, read_rows
from evergrad_trainer.data.preparation.rows import RowFormat
from evergrad_trainer.data.preparation.unpacking import open_content

_BLOCK: Final = 2**20
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

Texts = tuple[list[str], list[int]]
"""Some texts, and the line of each, counted through the source."""


@dataclass(frozen=True)
class TextFormat:
    """Settings of a source's entry on how its files are read."""

    type: Literal["jsonl", "text", "parquet"]
    text_field: str
    document: Literal["file", "line"]
    rows: RowFormat | PairFormat | None = None
    """How rows are read, where each line is one."""

    @staticmethod
    def of(source: SourceEntry, rows: RowFormat | PairFormat | None = None) -> "TextFormat":
        """The format of a source that has texts."""
        if source.type == "tokens":
            raise ValueError("a source of tokens has no texts")
        return TextFormat(source.type, source.text_field, source.document, rows)

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        value = asdict(self)
        return {**value, "rows": self.rows.to_json() if self.rows else None}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "TextFormat":
        """The inverse of ``to_json``."""
        rows = read_format(value["rows"]) if value["rows"] else None
        return TextFormat(**{**value, "rows": rows})


class TextReader:
    """Reads chunks of a source, one after the other. A context, which closes the file that is open.

    A compressed file stays open between two chunks of it, since it can only be read on.
    """

    def __init__(self, form: TextFormat) -> None:
        self._form = form
        self._path: Path | None = None
        self._file: RawIOBase | None = None
        self._open = ExitStack()

    def __enter__(self) -> "TextReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def read(self, chunk: Chunk, tally: LineCounts) -> Iterator[Texts]:
        """The texts of a chunk, block by block. Texts that are passed over are counted in ``tally``.

        Raises DataError for a file that is shorter than it was, damaged or cut short; OSError.
        """
        if self._form.type == "parquet":
            rows, column = self._form.rows, self._form.text_field
            for piece in chunk.pieces:
                path, first = piece.path, piece.first_line
                groups = range(piece.start, piece.end)
                if rows is None:
                    yield from read_rows(path, groups, column, first_row=first, tally=tally)
                    continue
                yield from read_objects(
                    path,
                    groups,
                    rows.keys,
                    first_row=first,
                    tally=tally,
                    render=rows.render,
                )
            return
        if self._form.type == "text" and self._form.document == "file":
            yield from self._whole_files(chunk, tally)
            return
        field = self._form.text_field if self._form.type == "jsonl" else None
        for piece in chunk.pieces:
            reader = DocumentReader(
                text_field=field,
                first_line=piece.first_line,
                tally=tally,
                render=None if self._form.rows is None else self._form.rows.render,
            )
            file = self._at(piece.path)
            try:
                for block in read_blocks(
                    file, start=piece.start, end=piece.end, size=_BLOCK
                ):
                    yield reader.read(block)
            except EOFError:
                raise _shorter(piece.path) from None

    def _whole_files(self, chunk: Chunk, tally: LineCounts) -> Iterator[Texts]:
        texts: list[str] = []
        lines: list[int] = []
        size = 0
        for piece in chunk.pieces:
            file = self._at(piece.path)
            data = bytearray()
            # A read gives as much as it likes. One byte more than the scan saw shows that there is more now.
            while len(data) <= piece.end and (more := file.read(piece.end + 1 - len(data))):
                data += more
            if len(data) != piece.end:
                raise _shorter(piece.path)
            size += piece.size
            try:
                text = data.removeprefix(_BYTE_ORDER_MARK).decode()
            except UnicodeDecodeError as error:
                why = f"byte {error.start} of its text starts no character"
                problem = LineProblem(piece.first_line, "the file is not UTF-8", why)
                tally.pass_over(problem, SkipReason.NOT_UTF8)
            else:
                if text:
                    texts.append(text)
                    lines.append(piece.first_line)
                else:
                    tally.skipped[SkipReason.EMPTY_TEXT] += 1
            # Small files together: a tokenizer takes many texts at a time.
            if size >= _BLOCK:
                yield texts, lines
                texts, lines, size = [], [], 0
        if texts:
            yield texts, lines

    def _at(self, path: Path) -> RawIOBase:
        """The content of a file, at its beginning or wherever it was read to."""
        if self._file is None or path != self._path:
            self._open.close()
            self._file = self._open.enter_context(open_content(path))
            self._path = path
        return self._file


def _shorter(path: Path) -> DataError:
    what = "changed its length while it was being prepared"
    return DataError(Problem(str(path), what, "", "Let its writer finish, and start again"))
