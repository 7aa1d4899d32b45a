"""The content of a source: its files as they were scanned, and the chunks of them that jobs work on."""

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
"""Jobs that read one compressed source at the same time: each unpacks what lies before its part, too."""


@dataclass(frozen=True)
class ContentPiece:
    """A span of a file (``sources.Span``), whose ``first_line`` counts through the whole source."""

    path: Path
    start: int
    end: int
    first_line: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """Pieces that are tokenised into one token file."""

    number: int
    pieces: tuple[ContentPiece, ...]

    @property
    def size(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.size for piece in self.pieces)

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
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
    """Files of a source in their order, each with its scan."""

    files: tuple[tuple[Path, Scan], ...]

    @cached_property
    def content_hash(self) -> str:
        """Hash of what the files hold, in their order. Their names and places are no part of it."""
        if len(self.files) == 1:
            return self.files[0][1].content_hash
        text = json.dumps([[scan.content_hash, scan.size] for _, scan in self.files])
        return xxhash.xxh3_128_hexdigest(text.encode())

    @cached_property
    def size(self) -> int:
        """Bytes of all files, unpacked."""
        return sum(scan.size for _, scan in self.files)

    @cached_property
    def lines(self) -> int:
        """Lines, rows or documents of all files, counted through."""
        return sum(scan.lines for _, scan in self.files)

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Spans of all files in their order, put together to chunks of a like size.

        Depends on the content alone. A source of one large file has a chunk for each span.
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

    def place(self, line: int) -> tuple[Path, int]:
        """The file, and the line in it, of a line that is counted through the source (from 1)."""
        ends = list(accumulate(scan.lines for _, scan in self.files))
        at = bisect_right(ends, line - 1)
        return self.files[at][0], line - (ends[at - 1] if at else 0)

    def raise_if_changed(self) -> None:
        """Raise DataError if a file is not the one that was scanned."""
        for path, scan in self.files:
            raise_if_changed(path, scan.stat)

    def runs(self, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, ...]]:
        """``chunks`` as jobs work on them: each alone, but several of a compressed file one after the other,
        since that can be read from its beginning only."""
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
