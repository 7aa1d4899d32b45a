"""Source files: where they are, what is wrong with them, and one pass over each for hash, lines, chunks."""

import os
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training import Source, Training
from evergrad_trainer.errors import DataError
from evergrad_trainer.host_trouble import is_host_trouble

OnBytes = Callable[[int], None]

SMALLEST_CHUNK: Final = 8 * 2**20
_MOST_CHUNKS: Final = 4096
_BLOCK: Final = 4 * 2**20
_SETTLED_NS: Final = 2 * 10**9
"""A file that changed less than this before its scan could change again within the same tick of its clock."""

_SIGNATURES: Final = (
    (b"\x1f\x8b", "is compressed (gzip)", "Decompress it"),
    (b"\x28\xb5\x2f\xfd", "is compressed (zstandard)", "Decompress it"),
    (b"BZh", "is compressed (bzip2)", "Decompress it"),
    (b"\xfd7zXZ", "is compressed (xz)", "Decompress it"),
    (b"PK\x03\x04", "is a zip archive", "Unpack it"),
    (b"PAR1", "is a Parquet file", "Convert it to one JSON object a line"),
    (b"\xff\xfe", "is UTF-16 text", "Convert it to UTF-8, e.g. with iconv"),
    (b"\xfe\xff", "is UTF-16 text", "Convert it to UTF-8, e.g. with iconv"),
)


@dataclass(frozen=True)
class SourceFile:
    """One entry of ``data.sources`` or ``evaluation.sources``. ``field``: its path in the manifest."""

    field: str
    name: str
    path: Path
    type: Literal["jsonl", "tokens"]
    text_field: str
    dtype: Literal["uint16", "uint32"]


@dataclass(frozen=True)
class Stat:
    """Size and times of a file, which a file system gives without reading it."""

    size: int
    mtime_ns: int
    ctime_ns: int


@dataclass(frozen=True)
class Chunk:
    """Bytes [start, end) of a jsonl file: whole lines, the first of them numbered ``first_line`` (from 1)."""

    number: int
    start: int
    end: int
    first_line: int


@dataclass(frozen=True)
class Scan:
    """The result of one pass over a file. ``chunks`` of a jsonl file; ``largest_id`` of a tokens file."""

    stat: Stat
    content_hash: str
    lines: int = 0
    chunks: tuple[Chunk, ...] = ()
    largest_id: int = -1

    def to_json(self) -> dict[str, Any]:
        """JSON values only."""
        return asdict(self)

    @staticmethod
    def from_json(value: dict[str, Any]) -> "Scan":
        """The inverse of ``to_json``."""
        chunks = tuple(Chunk(**chunk) for chunk in value["chunks"])
        return Scan(**{**value, "stat": Stat(**value["stat"]), "chunks": chunks})


def training_files(training: Training, base_directory: Path) -> list[SourceFile]:
    """The files of ``data.sources``, in the manifest's order."""
    sources = enumerate(training.data.sources)
    return [
        _source_file(source, f"spec.training.data.sources[{index}]", base_directory)
        for index, source in sources
    ]


def evaluation_files(training: Training, base_directory: Path) -> list[SourceFile]:
    """The files of ``evaluation.sources``, in the manifest's order."""
    sources = enumerate(training.evaluation.sources)
    return [
        _source_file(source, f"spec.training.evaluation.sources[{index}]", base_directory)
        for index, source in sources
    ]


def _source_file(source: Source, field: str, base_directory: Path) -> SourceFile:
    return SourceFile(
        field,
        source.name,
        base_directory / source.path,
        source.type,
        source.text_field,
        source.dtype,
    )


def source_problems(source: SourceFile) -> list[Problem]:
    """Find what is wrong with a source without reading it through: missing, a directory, unreadable, empty,
    half an id."""
    where, named = str(source.path), f"{source.field}.path names it"
    try:
        found = source.path.stat()
    except FileNotFoundError:
        remedy = "Check the path; it is relative to the manifest's directory"
        return [Problem(where, "does not exist", named, remedy)]
    except OSError as error:
        # A volume that is away for a moment is no mistake of the manifest: another host may go on.
        why, remedy = f"{error.strerror} ({named})", "Check the path and its permissions"
        is_of_host = is_host_trouble(error)
        return [Problem(where, "cannot be read", why, remedy, is_of_host=is_of_host)]

    if stat.S_ISDIR(found.st_mode):
        remedy = "Name one file; several files are several sources"
        return [Problem(where, "is a directory", named, remedy)]
    if not stat.S_ISREG(found.st_mode):
        remedy = "Copy its content into a file; it is read more than once"
        return [Problem(where, "is not a regular file", named, remedy)]
    if not os.access(source.path, os.R_OK):
        why = f"permission denied ({named})"
        return [Problem(where, "cannot be read", why, "Change its permissions")]
    if found.st_size == 0:
        remedy = "Check how the file was made, or remove the source"
        return [Problem(where, "is empty", named, remedy)]
    if source.type == "jsonl":
        return []

    width, size = np.dtype(source.dtype).itemsize, found.st_size
    if size % width:
        why = f"its size, {size} bytes, is not a multiple of {width} ({source.field}.dtype is {source.dtype})"
        remedy = "Check the dtype; if it is right the file is truncated: copy it again"
        return [Problem(where, "ends within a token id", why, remedy)]
    if size < 2 * width:
        why = "one token predicts the next"
        return [Problem(where, "holds a single token id", why, "Give at least two tokens")]
    return []


def observe_stat(path: Path) -> Stat:
    """The file's size and times. Raises OSError."""
    found = path.stat()
    return Stat(found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def scan_source(source: SourceFile, *, on_bytes: OnBytes) -> Scan:
    """Read the whole file once.

    Raises DataError where it cannot be what the manifest says, or changes meanwhile.
    """
    # Compared afterwards: bytes of two versions of a file would get the hash of neither.
    before = observe_stat(source.path)
    if source.type == "jsonl":
        scan = _scan_lines(source, before, on_bytes)
    else:
        digest, largest = xxhash.xxh3_128(), -1
        for buffer, count in _blocks(source.path, before.size, on_bytes):
            digest.update(memoryview(buffer)[:count])
            largest = max(largest, int(_ids_in(buffer, count, source).max()))
        scan = Scan(before, digest.hexdigest(), largest_id=largest)
    raise_if_changed(source, before)
    return scan


def raise_if_changed(source: SourceFile, before: Stat) -> None:
    """Raise DataError if the file is not the one ``before`` was observed on."""
    if observe_stat(source.path) != before:
        problem = Problem(
            str(source.path),
            "changed while it was being prepared",
            "what was read is not what is there",
            "Let its writer finish, and start again",
        )
        raise DataError(problem)


def is_settled(found: Stat) -> bool:
    """Whether a later change of the file must show in its times."""
    return time.time_ns() - max(found.mtime_ns, found.ctime_ns) > _SETTLED_NS


def _blocks(path: Path, size: int, on_bytes: OnBytes) -> Iterator[tuple[bytearray, int]]:
    """The first ``size`` bytes as (buffer, valid bytes), the buffer being the same one every time."""
    buffer = bytearray(_BLOCK)
    with path.open("rb", buffering=0) as file:
        # Bounded by the size that was observed: a file that is still being written might never end.
        while count := file.readinto(memoryview(buffer)[:size]):
            yield buffer, count
            on_bytes(count)
            size -= count


def _scan_lines(source: SourceFile, found: Stat, on_bytes: OnBytes) -> Scan:
    """Hash, lines and chunks of a jsonl file, in one pass."""
    # Larger chunks of a larger file: their number, and with it that of files and records, is bounded.
    digest = xxhash.xxh3_128()
    boundaries = _Boundaries(max(SMALLEST_CHUNK, -(-found.size // _MOST_CHUNKS)))
    for buffer, count in _blocks(source.path, found.size, on_bytes):
        # Seen before the rest is read: a compressed file of 100 GB is refused at once.
        if boundaries.position == 0:
            why = "a jsonl source is plain UTF-8 text, one JSON object a line"
            problems = [
                Problem(str(source.path), what, why, remedy)
                for signature, what, remedy in _SIGNATURES
                if buffer.startswith(signature)
            ]
            raise_if(problems, DataError)
        digest.update(memoryview(buffer)[:count])
        boundaries.see(buffer, count)
    chunks = boundaries.finish()
    return Scan(found, digest.hexdigest(), lines=boundaries.lines, chunks=chunks)


class _Boundaries:
    """Counts lines and cuts a file after the first newline beyond each ``chunk_bytes``; depends on nothing
    but the content."""

    def __init__(self, chunk_bytes: int) -> None:
        self.position = 0
        self.lines = 0
        self._chunk_bytes = chunk_bytes
        self._chunks: list[Chunk] = []
        self._start, self._first_line = 0, 1
        self._ends_with_newline = True

    def see(self, buffer: bytearray, count: int) -> None:
        """The next ``count`` bytes of the file."""
        # Cut behind the first newline at or beyond the wanted length, as often as this block holds one.
        begin = 0
        while (target := self._start + self._chunk_bytes - self.position) < count:
            newline = buffer.find(b"\n", max(0, target), count)
            if newline < 0:
                break
            self.lines += _count_newlines(buffer, begin, newline + 1)
            begin = newline + 1
            self._cut(self.position + begin)

        # The rest of the block belongs to the chunk that goes on in the next one.
        self.lines += _count_newlines(buffer, begin, count)
        self.position += count
        self._ends_with_newline = buffer[count - 1] == ord("\n")

    def finish(self) -> tuple[Chunk, ...]:
        """The chunks, once the whole file was seen."""
        # A last line without a newline is a line.
        if not self._ends_with_newline:
            self.lines += 1
        if self.position > self._start:
            self._cut(self.position)
        return tuple(self._chunks)

    def _cut(self, end: int) -> None:
        self._chunks.append(Chunk(len(self._chunks), self._start, end, self._first_line))
        self._start, self._first_line = end, self.lines + 1


def _count_newlines(buffer: bytearray, begin: int, end: int) -> int:
    """Three times as quick as ``bytearray.count``."""
    return int(
        np.count_nonzero(
            np.frombuffer(buffer, dtype=np.uint8, count=end - begin, offset=begin) == ord("\n")
        )
    )


def raise_if_out_of_vocabulary(source: SourceFile, scan: Scan, vocab_size: int) -> None:
    """Raise DataError, naming the first place, if a tokens file holds an id the tokenizer does not have."""
    # The scan, remembered between starts, has the largest id: a right file is not read again.
    if scan.largest_id < vocab_size:
        return
    place = 0
    for buffer, count in _blocks(source.path, scan.stat.size, lambda _: None):
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
            raise DataError(Problem(str(source.path), what, why, remedy))
        place += ids.size


def _ids_in(buffer: bytearray, count: int, source: SourceFile) -> npt.NDArray[Any]:
    """The token ids in the first ``count`` bytes of a block, which holds whole ids."""
    dtype = np.dtype(source.dtype).newbyteorder("<")
    return np.frombuffer(buffer, dtype=dtype, count=count // dtype.itemsize)
