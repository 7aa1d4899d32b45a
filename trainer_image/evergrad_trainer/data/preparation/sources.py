"""Scans a file of a source in one pass: computes its hash, counts its lines, and divides it into spans."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import xxhash

from evergrad_manifest.errors import Problem, raise_if
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.data.preparation.files import (
    LARGEST_DOCUMENT,
    SourceEntry,
    too_large_document,
)
from evergrad_trainer.data.preparation.parquet import find_row_groups, read_row_groups
from evergrad_trainer.data.preparation.unpacking import Unpacked, is_packed, open_content

OnBytes = Callable[[int], None]

SMALLEST_CHUNK: Final = 8 * 2**20
MOST_CHUNKS: Final = 4096
_BLOCK: Final = 4 * 2**20
_SETTLED_NS: Final = 2 * 10**9
"""A file that changed less than 2 s before its scan could change again without a change of its times."""

_SIGNATURES_BUT_OF_TEXT: Final = (
    (b"\x1f\x8b", "is compressed twice (gzip)", "Decompress it once"),
    (b"\x28\xb5\x2f\xfd", "is compressed twice (zstandard)", "Decompress it once"),
    (b"\xfd7zXZ", "is compressed (xz)", "Decompress it"),
    (b"PK\x03\x04", "is a zip archive", "Unpack it"),
    (b"\xff\xfe", "is UTF-16 text", "Convert it to UTF-8, e.g. with iconv"),
    (b"\xfe\xff", "is UTF-16 text", "Convert it to UTF-8, e.g. with iconv"),
)
_SIGNATURES: Final = (
    *_SIGNATURES_BUT_OF_TEXT,
    (b"BZh", "is compressed (bzip2)", "Decompress it"),
    (b"PAR1", "is a Parquet file", "Set type: parquet"),
)
"""First bytes of files that are not JSON Lines. Plain text may begin with the last two signatures."""


@dataclass(frozen=True)
class Stat:
    """Size and times of a file, which are available without reading the file."""

    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class FileSpan:
    """A part of a file that is processed as a unit.

    It consists of the bytes [start, end) of the unpacked content, which are whole lines, or of the row groups
    [start, end) of a Parquet file. ``first_line``: the number of its first line or row, from 1. ``size``: its
    size in bytes; for row groups, the bytes of the columns that are read.
    """

    start: int
    end: int
    first_line: int
    size: int


@dataclass(frozen=True)
class Scan:
    """The result of scanning a file.

    ``content_hash`` and ``size`` describe the unpacked content, so a compressed file is the same data as the
    plain file. ``lines``: number of lines, or of rows of a Parquet file; 1 for a file that is one document.
    ``largest_id``: the largest id in a tokens file.
    """

    stat: Stat
    content_hash: str
    size: int
    lines: int = 0
    spans: tuple[FileSpan, ...] = ()
    largest_id: int = -1
    is_packed: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the scan as JSON values."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Scan":
        """The inverse of ``to_json``."""
        spans = tuple(FileSpan(**span) for span in value["spans"])
        return Scan(**{**value, "stat": Stat(**value["stat"]), "spans": spans})


def observe_stat(path: Path) -> Stat:
    """Return the file's size and times. Raises OSError if the file cannot be accessed."""
    found = path.stat()
    return Stat(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def scan_file(source: SourceEntry, path: Path, *, on_bytes: OnBytes) -> Scan:
    """Read a whole file of a source one time.

    Raises DataError if its format differs from the manifest, or if it changes in the meantime.
    """
    # Compare the state afterwards: a hash over bytes of two versions would match neither version.
    before = observe_stat(path)
    if source.type == "tokens":
        digest, largest = xxhash.xxh3_128(), -1
        for buffer, count in _blocks(path, before.size, on_bytes):
            digest.update(memoryview(buffer)[:count])
            largest = max(largest, int(_ids_in(buffer, count, source).max()))
        scan = Scan(before, digest.hexdigest(), before.size, largest_id=largest)
    elif source.type == "parquet":
        scan = _scan_parquet(source, path, before, on_bytes)
    else:
        scan = _scan_text(source, path, before, on_bytes)
    raise_if_changed(path, before)
    return scan


def raise_if_changed(path: Path, before: Stat) -> None:
    """Raise DataError if the file has changed since ``before`` was observed."""
    if observe_stat(path) != before:
        problem = Problem(
            str(path),
            "changed while it was being prepared",
            "the data that was read differs from the file",
            "Let its writer finish, and start again",
        )
        raise DataError(problem)


def is_settled(found: Stat) -> bool:
    """Whether the file is old enough that any later change will change its times."""
    return time.time_ns() - max(found.mtime_ns, found.ctime_ns) > _SETTLED_NS


def _blocks(path: Path, size: int, on_bytes: OnBytes) -> Iterator[tuple[bytearray, int]]:
    """Yield the first ``size`` bytes as pairs (buffer, number of valid bytes). The buffer is reused."""
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        # Stop at the observed size, because a file that is still being written might never end.
        while count := file.readinto(memoryview(buffer)[:size]):
            yield buffer, count
            on_bytes(count)
            size -= count


def _content_blocks(
    path: Path, size: int, on_bytes: OnBytes
) -> Iterator[tuple[bytearray, int]]:
    """Yield blocks like ``_blocks``, decompressing the file if needed. ``on_bytes`` gets compressed bytes."""
    with open_content(path) as file:
        if not isinstance(file, Unpacked):
            yield from _blocks(path, size, on_bytes)
            return
        buffer, before = bytearray(_BLOCK), 0
        while count := file.readinto(buffer):
            yield buffer, count
            on_bytes(file.packed_bytes - before)
            before = file.packed_bytes


def _scan_text(source: SourceEntry, path: Path, found: Stat, on_bytes: OnBytes) -> Scan:
    """Compute the hash, the number of lines and the spans of a text file."""
    packed = is_packed(path)
    size = 0 if packed else found.size
    while True:
        # Use larger spans for a larger file, which bounds the number of spans, files and records.
        digest = xxhash.xxh3_128()
        boundaries = _Boundaries(max(SMALLEST_CHUNK, -(-size // MOST_CHUNKS)))
        for buffer, count in _content_blocks(path, found.size, on_bytes):
            # Check the first block before reading the rest, so that a large file of another format is refused
            # without reading it all.
            if boundaries.position == 0:
                _raise_if_of_another_kind(source, path, buffer[:count])
            digest.update(memoryview(buffer)[:count])
            boundaries.see(buffer, count)
            if source.is_whole_files and boundaries.position > LARGEST_DOCUMENT:
                raise DataError(too_large_document(path, "more bytes unpacked", source))
        total = boundaries.position
        if total <= max(size, SMALLEST_CHUNK * MOST_CHUNKS):
            break
        # The unpacked size of a compressed file is known only now. Scan it again with spans for this size, so
        # that its spans are the same as for the plain file.
        size, on_bytes = total, lambda _: None

    spans, lines = boundaries.finish(), boundaries.lines
    if source.is_whole_files:
        spans, lines = (FileSpan(0, total, 1, total),), 1
    return Scan(
        found, digest.hexdigest(), total, lines=lines, spans=spans, is_packed=packed
    )


def _scan_parquet(source: SourceEntry, path: Path, found: Stat, on_bytes: OnBytes) -> Scan:
    """Compute the hash and the number of rows of a Parquet file. A span has enough row groups for a chunk."""
    # Read the metadata first, so that a large file of another format is refused without reading it all.
    if source.row_fields:
        groups = find_row_groups(path, source.row_fields)
    else:
        groups = read_row_groups(path, source.text_field, field=source.field)
    digest = xxhash.xxh3_128()
    for buffer, count in _blocks(path, found.size, on_bytes):
        digest.update(memoryview(buffer)[:count])

    wanted = max(SMALLEST_CHUNK, -(-sum(group.size for group in groups) // MOST_CHUNKS))
    spans: list[FileSpan] = []
    start = size = rows = 0
    first_row = 1
    for end, group in enumerate(groups, 1):
        size, rows = size + group.size, rows + group.rows
        if size >= wanted or end == len(groups):
            spans.append(FileSpan(start, end, first_row, size))
            start, first_row = end, first_row + rows
            size = rows = 0
    return Scan(
        found, digest.hexdigest(), found.size, lines=first_row - 1, spans=tuple(spans)
    )


def _raise_if_of_another_kind(source: SourceEntry, path: Path, start: bytearray) -> None:
    why = f"a {source.type} source is plain UTF-8 text, or that compressed with gzip or zstandard"
    signatures = _SIGNATURES if source.type == "jsonl" else _SIGNATURES_BUT_OF_TEXT
    problems = [
        Problem(str(path), what, why, remedy)
        for signature, what, remedy in signatures
        if start.startswith(signature)
    ]
    # Tar archives have their signature at byte 257, after the name of the first file.
    if start[257:262] == b"ustar":
        problems.append(Problem(str(path), "is a tar archive", why, "Unpack it"))
    raise_if(problems, DataError)


class _Boundaries:
    """Counts lines, and cuts a file after the first newline beyond each ``chunk_bytes``.

    The result depends only on the content, not on the size of the blocks.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self.position = 0
        self.lines = 0
        self._chunk_bytes = chunk_bytes
        self._spans: list[FileSpan] = []
        self._start, self._first_line = 0, 1
        self._ends_with_newline = True

    def see(self, buffer: bytearray, count: int) -> None:
        """Process the next ``count`` bytes of the file."""
        # Cut after the first newline at or beyond the wanted length, repeatedly within this block.
        begin = 0
        while (target := self._start + self._chunk_bytes - self.position) < count:
            newline = buffer.find(b"\n", max(0, target), count)
            if newline < 0:
                break
            self.lines += _count_newlines(buffer, begin, newline + 1)
            begin = newline + 1
            self._cut(self.position + begin)

        # The rest of the block belongs to a chunk that continues in the next block.
        self.lines += _count_newlines(buffer, begin, count)
        self.position += count
        self._ends_with_newline = buffer[count - 1] == ord("\n")

    def finish(self) -> tuple[FileSpan, ...]:
        """Return the spans. Call it after the whole file was processed."""
        # Count a last line without a newline too.
        if not self._ends_with_newline:
            self.lines += 1
        if self.position > self._start:
            self._cut(self.position)
        return tuple(self._spans)

    def _cut(self, end: int) -> None:
        size = end - self._start
        self._spans.append(FileSpan(self._start, end, self._first_line, size))
        self._start, self._first_line = end, self.lines + 1


def _count_newlines(buffer: bytearray, begin: int, end: int) -> int:
    """Count the newlines in [begin, end). Three times as fast as ``bytearray.count``."""
    return int(
        np.count_nonzero(
            np.frombuffer(buffer, dtype=np.uint8, count=end - begin, offset=begin)
            == ord("\n")
        )
    )


def raise_if_out_of_vocabulary(
    source: SourceEntry, path: Path, scan: Scan, vocab_size: int
) -> None:
    """Raise DataError, with the first position, if a tokens file has an id outside the vocabulary."""
    # Check the largest id from the scan, which is cached between starts, so that a valid file is not read
    # again.
    if scan.largest_id < vocab_size:
        return
    place = 0
    for buffer, count in _blocks(path, scan.stat.size, lambda _: None):
        ids = _ids_in(buffer, count, source)
        wrong = np.flatnonzero(ids >= vocab_size)
        if wrong.size:
            what = f"token {place + int(wrong[0])} is {int(ids[wrong[0]])}"
            why = (
                f"the tokenizer has the ids 0 to {vocab_size - 1}; the largest in the file is "
                f"{scan.largest_id}"
            )
            remedy = (
                f"Check {source.field}.dtype ({source.dtype}) and that the file was made with this "
                "tokenizer"
            )
            raise DataError(Problem(str(path), what, why, remedy))
        place += ids.size


def _ids_in(buffer: bytearray, count: int, source: SourceEntry) -> npt.NDArray[Any]:
    """Return the token ids in the first ``count`` bytes of a block, which contains whole ids."""
    dtype = np.dtype(source.dtype).newbyteorder("<")
    return np.frombuffer(buffer, dtype=dtype, count=count // dtype.itemsize)
