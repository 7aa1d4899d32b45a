"""The content of a source: its scanned files, and their division into chunks for jobs."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, Final

import xxhash

from evergrad_trainer.data.preparation import sources
from evergrad_trainer.data.preparation.sources import Scan, raise_if_changed

_MOST_READERS: Final = 8
"""Maximum number of jobs that read a compressed source at the same time. Each job must also unpack the
content before its part."""


@dataclass(frozen=True)
class ContentPiece:
    """A span of a file (``sources.FileSpan``), whose ``first_line`` counts through the whole source."""

    path: Path
    start: int
    end: int
    first_line: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """Pieces of files that are tokenised into one token file."""

    number: int
    pieces: tuple[ContentPiece, ...]

    @property
    def size(self) -> int:
        """Size of all pieces in bytes."""
        return sum(piece.size for piece in self.pieces)

    def to_json(self) -> dict[str, Any]:
        """Return the chunk as JSON values."""
        pieces = [{**asdict(piece), "path": str(piece.path)} for piece in self.pieces]
        return {"number": self.number, "pieces": pieces}

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Chunk":
        """The inverse of ``to_json``."""
        pieces = (
            ContentPiece(**{**one, "path": Path(one["path"])}) for one in value["pieces"]
        )
        return Chunk(value["number"], tuple(pieces))


@dataclass(frozen=True)
class Content:
    """The files of a source in order, each with its scan."""

    files: tuple[tuple[Path, Scan], ...]

    @cached_property
    def content_hash(self) -> str:
        """Hash of the contents of the files, in order. It does not depend on their names or paths."""
        if len(self.files) == 1:
            return self.files[0][1].content_hash
        text = json.dumps([[scan.content_hash, scan.size] for _, scan in self.files])
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def size(self) -> int:
        """Unpacked size of all files in bytes."""
        return sum(scan.size for _, scan in self.files)

    @cached_property
    def lines(self) -> int:
        """Number of lines, rows or documents of all files."""
        return sum(scan.lines for _, scan in self.files)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The spans of all files in order, combined into chunks of similar size.

        The chunks depend only on the content. If a source is one large file, each span is a chunk.
        """
        total = sum(span.size for _, scan in self.files for span in scan.spans)
        wanted = max(sources.SMALLEST_CHUNK, -(-total // sources.MOST_CHUNKS))
        found: list[Chunk] = []
        pieces: list[ContentPiece] = []
        size = lines = 0
        for path, scan in self.files:
            for span in scan.spans:
                first = lines + span.first_line
                pieces.append(ContentPiece(path, span.start, span.end, first, span.size))
                size += span.size
                if size >= wanted:
                    found.append(Chunk(len(found), tuple(pieces)))
                    pieces, size = [], 0
            lines += scan.lines
        if pieces:
            found.append(Chunk(len(found), tuple(pieces)))
        return tuple(found)

    @cached_property
    def boundaries_hash(self) -> str:
        """Hash of the boundaries of the chunks. It does not depend on the names or paths of the files."""
        numbers = {path: number for number, (path, _) in enumerate(self.files)}
        pieces = [
            [chunk.number, numbers[piece.path], piece.start, piece.end]
            for chunk in self.chunks
            for piece in chunk.pieces
        ]
        return xxhash.xxh3_64_hexdigest(json.dumps(pieces).encode())

    def place(self, line: int) -> tuple[Path, int]:
        """Return the file and the line in this file for a line number (from 1) in the whole source."""
        ends = list(accumulate(scan.lines for _, scan in self.files))
        at = bisect_right(ends, line - 1)
        return self.files[at][0], line - (ends[at - 1] if at else 0)

    def raise_if_changed(self) -> None:
        """Raise DataError if a file has changed since it was scanned."""
        for path, scan in self.files:
            raise_if_changed(path, scan.stat)

    def runs(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, ...]]:
        """Divide ``chunks`` into jobs.

        A job has one chunk, or several consecutive chunks of a compressed file, because a compressed file can
        be read only from its beginning.
        """
        packed = {path for path, scan in self.files if scan.is_packed}
        longest = {}
        for path in packed:
            whole = sum(chunk.pieces[0].path == path for chunk in self.chunks)
            longest[path] = -(-whole * len(packed) // _MOST_READERS)

        def first_path(chunk: Chunk) -> Path:
            return chunk.pieces[0].path

        for path, group in groupby(chunks, key=first_path):
            waiting = tuple(group)
            length = longest.get(path, 1)
            for first in range(0, len(waiting), length):
                yield waiting[first : first + length]
