"""The sources of a manifest and their files. A path names one file, a folder, or a pattern."""

import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final, Literal

import numpy as np

from evergrad_common.contract import RunFile
from evergrad_manifest.errors import Problem
from evergrad_manifest.training import Source, Training
from evergrad_trainer.base.host_errors import is_host_trouble
from evergrad_trainer.data.preparation.token_layout import (
    HEAD_BYTES,
    conversion,
    describe_header,
    find_layout,
)

MOST_FILES: Final = 65_536
"""Maximum number of files of one source. ``run.json``, which every node reads, lists each name and hash."""
LARGEST_DOCUMENT: Final = 256 * 2**20
"""Maximum bytes of a file that is one document: its bytes, text and tokens are in memory at the same time."""
_MAGIC: Final = frozenset("*?[")
_PASSED_OVER: Final = (".", "_")
"""First characters of names that are skipped unless the pattern begins with the same character.

They mark hidden files, and files that writers add to their output, for example ``_SUCCESS``.
"""
SCANS: Final = ".scans"
"""Folder of cached scans in a directory of prepared data. Its presence identifies such a directory."""
_OF_RUNS: Final = frozenset(name for key, name in vars(RunFile).items() if key.isupper())
_RUN_MARKERS: Final = frozenset({RunFile.RESOLVED, RunFile.REQUESTED, RunFile.PROVENANCE})
_RUN_FOLDERS: Final = frozenset({RunFile.CHECKPOINTS, RunFile.LOGS})
"""A run directory contains one of these folders and one of the markers. A ``run.json`` alone does not
identify it, because other programs may write a file of this name."""
_ENDINGS: Final = {
    "jsonl": (".jsonl", ".ndjson"),
    "text": (".txt",),
    "parquet": (".parquet",),
    "tokens": (".bin", ".tokens"),
}
_PACKED_ENDINGS: Final = (".gz", ".zst")


@dataclass(frozen=True)
class SourceEntry:
    """One entry of ``data.sources`` or ``evaluation.sources``.

    ``field``: its path in the manifest. ``base``: the beginning of ``path`` that is not from the manifest, in
    which no character is part of a pattern.
    """

    field: str
    name: str
    path: Path
    type: Literal["jsonl", "text", "parquet", "tokens"]
    text_field: str
    dtype: Literal["uint16", "uint32"]
    document: Literal["file", "line"] = "file"
    base: Path = Path()
    row_fields: tuple[str, ...] = ()
    """Keys of a row, if the source is read as rows."""

    @property
    def is_whole_files(self) -> bool:
        """Whether each file is one document."""
        return self.type == "text" and self.document == "file"

    @property
    def unit(self) -> Literal["line", "row", "file"]:
        """The part of a source that contains one document."""
        if self.is_whole_files:
            return "file"
        return "row" if self.type == "parquet" else "line"

    def is_expanded(self, files: Sequence[Path]) -> bool:
        """Whether the path is a folder or pattern with the files ``files``, and not a single file."""
        return tuple(files) != (self.path,)


def training_sources(training: Training, base_directory: Path) -> list[SourceEntry]:
    """Return the entries of ``data.sources``, in the manifest's order."""
    where = "spec.training.data.sources"
    return _entries(training, training.data.sources, where, base_directory)


def evaluation_sources(training: Training, base_directory: Path) -> list[SourceEntry]:
    """Return the entries of ``evaluation.sources``, in the manifest's order."""
    where = "spec.training.evaluation.sources"
    return _entries(training, training.evaluation.sources, where, base_directory)


def _entries(
    training: Training, sources: Sequence[Source], where: str, base_directory: Path
) -> list[SourceEntry]:
    return [
        SourceEntry(
            f"{where}[{index}]",
            source.name,
            base_directory / source.path,
            source.type,
            source.text_field,
            source.dtype,
            source.document,
            base=Path() if Path(source.path).is_absolute() else base_directory,
            row_fields=training.row_fields,
        )
        for index, source in enumerate(sources)
    ]


def find_files(
    source: SourceEntry, *, prepared_directory: Path | None = None
) -> tuple[tuple[Path, ...], list[Problem]]:
    """Return the files of a source, sorted, and the problems that are found without reading whole files.

    Such problems are a file that is missing, unreadable or empty, or that ends within a token id. A folder
    names the files in and below it with an extension of the source's type; for example, ``.jsonl`` and
    ``.ndjson``. A pattern names the files that match it. Both skip files that runs wrote, and prepared data,
    including ``prepared_directory``, because a run would otherwise change its own data.
    """
    path = source.path
    try:
        # The name of a file may contain a bracket, so an existing path is never a pattern.
        own = path.parts[len(source.base.parts) :]
        is_pattern = any(not _MAGIC.isdisjoint(part) for part in own) and not path.exists()
        if not is_pattern and not path.is_dir():
            return (path,), _file_problems(source, path)
        parts = path.parts if is_pattern else (*path.parts, "**", "*")
        first = len(path.parts)
        if is_pattern:
            fixed = len(source.base.parts)
            first = fixed + next(
                at for at, part in enumerate(own) if not _MAGIC.isdisjoint(part)
            )
        folder = Path(*parts[:first])
        left_out = _identities(prepared_directory) - _identities(folder)
        found: set[Path] = set()
        for one in _match(folder, parts[first:], left_out, is_named=True):
            # In the name of a compressed file, the extension of the type comes before .gz or .zst.
            is_packed = source.type in ("jsonl", "text") and one.name.endswith(
                _PACKED_ENDINGS
            )
            name = one.stem if is_packed else one.name
            # Use a set: a pattern with two ** finds a file several times.
            if is_pattern or name.endswith(_ENDINGS[source.type]):
                found.add(one)
            # Stop at one file more than the limit, because a pattern may match a whole disk.
            if len(found) > MOST_FILES:
                break
    except OSError as error:
        return (), [_unreadable(source, Path(error.filename or path), error)]

    problems = _problems_of_number(source, len(found), is_pattern=is_pattern)
    # Sort by folders and code points, which gives the same order on every machine.
    files = sorted(found, key=lambda one: one.relative_to(folder).parts)
    if not problems:
        problems = [
            one for file in files for one in _file_problems(source, file, of_many=True)
        ]
    return tuple(files), problems


def relative_name(file: Path, source: SourceEntry) -> str:
    """Return the name of a file of a folder or pattern: its path relative to the folder, with ``/``."""
    folder = source.path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return Path(os.path.relpath(file, folder)).as_posix()


def _identities(folder: Path | None) -> frozenset[tuple[int, int]]:
    """Return the device and inode that identify a folder; an empty set if the folder does not exist."""
    try:
        found = None if folder is None else folder.stat()
    except OSError:
        found = None
    return frozenset() if found is None else frozenset({(found.st_dev, found.st_ino)})


def _match(
    folder: Path,
    parts: Sequence[str],
    above: frozenset[tuple[int, int]],
    *,
    is_named: bool = False,
) -> Iterator[Path]:
    """Yield the files below ``folder`` whose path matches ``parts``.

    ``above``: identities of folders to skip: the parent folders, because a link to a parent would never end,
    and excluded folders. ``is_named``: the manifest names this folder explicitly, without a pattern. Raises
    OSError if a folder cannot be read.
    """
    here = folder.stat()
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        return
    above |= {identity}
    with os.scandir(folder) as found:
        entries = list(found)

    # Skip records of a run, which grow while it trains, and token files that it writes.
    names = {entry.name for entry in entries}
    is_of_run = bool(names & _RUN_MARKERS and names & _RUN_FOLDERS)
    if not is_named and (is_of_run or SCANS in names):
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        # ** matches no folder at all; the loop below then matches each folder.
        yield from _match(folder, rest or ("*",), above - {identity}, is_named=is_named)
    for entry in entries:
        name = entry.name
        if is_of_run and name in _OF_RUNS:
            continue
        if name.startswith(_PASSED_OVER) and not first.startswith(name[0]):
            continue
        if first == "**":
            if entry.is_dir():
                yield from _match(folder / name, parts, above)
        elif fnmatchcase(name, first):
            if rest and entry.is_dir():
                yield from _match(folder / name, rest, above)
            elif not rest and not entry.is_dir():
                yield folder / name


def _problems_of_number(
    source: SourceEntry, number: int, *, is_pattern: bool
) -> list[Problem]:
    """Return the problem if a folder or pattern has no files, or too many."""
    where, named = str(source.path), f"{source.field}.path names it"
    if number > MOST_FILES:
        what, why = (
            f"names more than {MOST_FILES} files",
            f"their names are kept in run.json ({named})",
        )
        remedy = (
            "Join them to fewer, for example to JSON Lines, or cut the source into several"
        )
        return [Problem(where, what, why, remedy)]
    if number:
        return []
    if is_pattern:
        remedy = "Check the pattern; it is relative to the manifest's directory"
        return [Problem(where, "matches no file", named, remedy)]
    packed = " (or those with .gz or .zst)" if source.type in ("jsonl", "text") else ""
    what = (
        f"contains no file whose name ends in {' or '.join(_ENDINGS[source.type])}{packed}"
    )
    remedy = (
        f"Check the folder, or name its files by a pattern, such as {source.path / '*'}"
    )
    return [Problem(where, what, named, remedy)]


def _file_problems(
    source: SourceEntry, path: Path, *, of_many: bool = False
) -> list[Problem]:
    """Return the problems of one file that are found from its metadata and its first bytes."""
    where, named = str(path), f"{source.field}.path names it"
    try:
        found = path.stat()
    except OSError as error:
        return [_unreadable(source, path, error)]

    if not stat.S_ISREG(found.st_mode):
        remedy = "Copy its content into a file; it is read more than once"
        return [Problem(where, "is not a regular file", named, remedy)]
    if not os.access(path, os.R_OK):
        why = f"permission denied ({named})"
        return [Problem(where, "cannot be read", why, "Change its permissions")]
    if found.st_size == 0:
        # Accept it: programs that write many files may leave some empty. If all are empty, the source is
        # refused later.
        if of_many and source.type in ("jsonl", "text"):
            return []
        remedy = "Check how the file was made, or remove the source"
        return [Problem(where, "is empty", named, remedy)]
    if source.is_whole_files and found.st_size > LARGEST_DOCUMENT:
        return [too_large_document(path, f"{found.st_size} bytes", source)]
    if source.type != "tokens":
        return []

    # Check only the name, because any bytes may be valid ids.
    if path.name.endswith(_PACKED_ENDINGS):
        why = "token ids are read in place, at any position"
        return [Problem(where, "is compressed", why, "Decompress it")]
    size, width = found.st_size, np.dtype(source.dtype).itemsize
    if size % width:
        why = f"its size, {size} bytes, is not a multiple of {width} ({source.field}.dtype is {source.dtype})"
        remedy = "Check the dtype; if it is right the file is truncated: copy it again"
        return [Problem(where, "ends within a token id", why, remedy)]
    if size < 2 * width:
        why = "one token predicts the next"
        return [
            Problem(where, "contains a single token id", why, "Give at least two tokens")
        ]
    return _layout_problems(source, path)


def _layout_problems(source: SourceEntry, path: Path) -> list[Problem]:
    """Return the problem of a tokens file whose ids differ in width or byte order from the manifest."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return [_unreadable(source, path, error)]
    named = f"{source.field}.dtype is {source.dtype}"

    # Flat files have no header, so another format can be detected only by its first bytes.
    if (kind := describe_header(head)) is not None:
        what, why = f"is {kind}", f"its header would be read as token ids; {named}"
        remedy = f"Write its ids alone: numpy.load(…).astype({source.dtype!r}).tofile(…)"
        return [Problem(str(path), what, why, remedy)]

    layout = find_layout(head, source.dtype)
    if layout is None:
        return []
    what = f"holds {layout.in_words} ids"
    why = f"bytes of its first ids are zero, as only in this type; {named}, little-endian"
    remedy = (
        f"Convert it: {conversion(path, layout)}, and set {source.field}.dtype to uint32"
    )
    if layout.order == "<" and layout.width == 4:
        remedy = f"Set {source.field}.dtype to uint32"
    return [Problem(str(path), what, why, remedy)]


def too_large_document(path: Path, size: str, source: SourceEntry) -> Problem:
    """Return the problem of a file that is one document and larger than the limit."""
    what = f"has {size}, and a document may have at most {LARGEST_DOCUMENT}"
    why = "each file is one document, which must fit into memory"
    remedy = f"Set {source.field}.document to line, or cut the file"
    return Problem(str(path), what, why, remedy)


def _unreadable(source: SourceEntry, path: Path, error: OSError) -> Problem:
    named = f"{source.field}.path names it"
    if isinstance(error, FileNotFoundError):
        remedy = "Check the path; it is relative to the manifest's directory"
        return Problem(str(path), "does not exist", named, remedy)
    # A volume that is temporarily unavailable is not an error in the manifest: another host may continue.
    why, remedy = f"{error.strerror} ({named})", "Check the path and its permissions"
    return Problem(
        str(path), "cannot be read", why, remedy, is_of_host=is_host_trouble(error)
    )
