"""Reads the texts of a chunk from any type of source: JSON lines, plain lines, whole files or rows."""

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
"""Some texts, and the line number of each text in the whole source."""


@dataclass(frozen=True)
class TextFormat:
    """The settings of a source that determine how its files are read."""

    type: Literal["jsonl", "text", "parquet"]
    text_field: str
    document: Literal["file", "line"]
    rows: RowFormat | PairFormat | None = None
    """The format of rows, if each line is a row."""

    @staticmethod
    def of(source: SourceEntry, rows: RowFormat | PairFormat | None = None) -> "TextFormat":
        """Return the format of a source of texts. Raises ValueError for a source of tokens."""
        if source.type == "tokens":
            raise ValueError("a source of tokens has no texts")
        return TextFormat(source.type, source.text_field, source.document, rows)

    def to_json(self) -> dict[str, Any]:
        """Return the format as JSON values."""
        value = asdict(self)
        return {**value, "rows": self.rows.to_json() if self.rows else None}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "TextFormat":
        """The inverse of ``to_json``."""
        rows = read_format(value["rows"]) if value["rows"] else None
        return TextFormat(**{**value, "rows": rows})


class TextReader:
    """Reads chunks of a source in order. It is a context manager that closes the open file.

    A compressed file stays open between two of its chunks, because it can only be read forward.
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
        """Yield the texts of a chunk, block by block. Skipped texts are counted in ``tally``.

        Raises DataError if a file became shorter or is damaged, and OSError if it cannot be read.
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
            # Read until the end, because a read may return fewer bytes. Request one byte more than the
            # scanned size, to detect that the file has grown.
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
            # Yield small files together, because a tokenizer is faster with many texts.
            if size >= _BLOCK:
                yield texts, lines
                texts, lines, size = [], [], 0
        if texts:
            yield texts, lines

    def _at(self, path: Path) -> RawIOBase:
        """Return the content of a file, at its beginning or after the last read."""
        if self._file is None or path != self._path:
            self._open.close()
            self._file = self._open.enter_context(open_content(path))
            self._path = path
        return self._file


def _shorter(path: Path) -> DataError:
    what = "changed its length while it was being prepared"
    return DataError(Problem(str(path), what, "", "Let its writer finish, and start again"))
