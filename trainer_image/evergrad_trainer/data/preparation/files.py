"""The sources of a manifest, and the files that the path of each names: one, a folder's, or a pattern's."""

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
"""Files of one source at most: the name and hash of each are kept in ``run.json``, which every node reads."""
LARGEST_DOCUMENT: Final = 256 * 2**20
"""Bytes of a file that is one document: text, characters and tokens of it are in memory at the same time."""
_MAGIC: Final = frozenset("*?[")
_PASSED_OVER: Final = (".", "_")
"""First characters of names that only a pattern with the same beginning finds: what is hidden, and what
writers of many files leave beside them (``_SUCCESS``, ``_temporary``)."""
SCANS: Final = ".scans"
"""Folder of a directory of prepared data that every start of a run looks into, and by which it is known."""
_OF_RUNS: Final = frozenset(name for key, name in vars(RunFile).items() if key.isupper())
_RUN_MARKERS: Final = frozenset({RunFile.RESOLVED, RunFile.REQUESTED, RunFile.PROVENANCE})
_RUN_FOLDERS: Final = frozenset({RunFile.CHECKPOINTS, RunFile.LOGS})
"""A run directory has one of these beside one of the markers: a ``run.json`` alone may be anybody's."""
_ENDINGS: Final = {
    "jsonl": (".jsonl", ".ndjson"),
    "text": (".txt",),
    "parquet": (".parquet",),
    "tokens": (".bin", ".tokens"),
}
_PACKED_ENDINGS: Final = (".gz", ".zst")


@dataclass(frozen=True)
class SourceEntry:
    """One entry of ``data.sources`` or ``evaluation.sources``. ``field``: its path in the manifest.

    ``base``: the beginning of ``path`` that the manifest does not name, and in which no character is a
    pattern's.
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
    """Keys of a row, where the source is read as rows."""

    @property
    def is_whole_files(self) -> bool:
        """Whether each file is one document."""
        return self.type == "text" and self.document == "file"

    @property
    def unit(self) -> Literal["line", "row", "file"]:
        """The part of a source that holds one document."""
        if self.is_whole_files:
            return "file"
        return "row" if self.type == "parquet" else "line"

    def is_expanded(self, files: Sequence[Path]) -> bool:
        """Whether the path named ``files`` as a folder or pattern, and not the one file itself."""
        return tuple(files) != (self.path,)


def training_sources(training: Training, base_directory: Path) -> list[SourceEntry]:
    """``data.sources``, in the manifest's order."""
    where = "spec.training.data.sources"
    return _entries(training, training.data.sources, where, base_directory)


def evaluation_sources(training: Training, base_directory: Path) -> list[SourceEntry]:
    """``evaluation.sources``, in the manifest's order."""
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
    """The files of a source, sorted, and what is wrong with them without reading them through: missing,
    unreadable, empty, half an id.

    A folder stands for the files in and below it whose names end as those of the source's type do; a pattern
    for those that match it. Files that runs wrote are left out of both, and so is prepared data, also that in
    ``prepared_directory``: a run would otherwise change its own data.
    """
    path = source.path
    try:
        # A file may have a bracket in its name: what is there is taken as it is.
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
            # A compressed file has the ending of its type before that of its compression.
            is_packed = source.type in ("jsonl", "text") and one.name.endswith(
                _PACKED_ENDINGS
            )
            name = one.stem if is_packed else one.name
            # Two ** find a file once for each way to divide its folders between them.
            if is_pattern or name.endswith(_ENDINGS[source.type]):
                found.add(one)
            # One more than may be: a pattern that matches a whole disk is not followed to its end.
            if len(found) > MOST_FILES:
                break
    except OSError as error:
        return (), [_unreadable(source, Path(error.filename or path), error)]

    problems = _problems_of_number(source, len(found), is_pattern=is_pattern)
    # Folder by folder, by the numbers of the characters: the same order on every machine.
    files = sorted(found, key=lambda one: one.relative_to(folder).parts)
    if not problems:
        problems = [
            one for file in files for one in _file_problems(source, file, of_many=True)
        ]
    return tuple(files), problems


def relative_name(file: Path, source: SourceEntry) -> str:
    """The name of a file of a folder or pattern: its path from the folder, with ``/``."""
    folder = source.path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return Path(os.path.relpath(file, folder)).as_posix()


def _identities(folder: Path | None) -> frozenset[tuple[int, int]]:
    """Device and inode, by which two paths are one folder; nothing for a folder that is not there."""
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
    """The files below ``folder`` whose path matches ``parts``. Raises OSError for a folder that cannot be
    read.

    ``above``: the folders around it, since a link to one of them would have no end, and others that are left
    out. ``is_named``: the path names this folder, without a pattern.
    """
    here = folder.stat()
    identity = (here.st_dev, here.st_ino)
    if identity in above:
        return
    above |= {identity}
    with os.scandir(folder) as found:
        entries = list(found)

    # Left out: records that grow while the run trains, and token files that it makes.
    names = {entry.name for entry in entries}
    is_of_run = bool(names & _RUN_MARKERS and names & _RUN_FOLDERS)
    if not is_named and (is_of_run or SCANS in names):
        return
    first, rest = parts[0], parts[1:]
    if first == "**":
        # No folder at all, then each folder below it.
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
    """None or too many files."""
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
    what = f"holds no file whose name ends in {' or '.join(_ENDINGS[source.type])}{packed}"
    remedy = (
        f"Check the folder, or name its files by a pattern, such as {source.path / '*'}"
    )
    return [Problem(where, what, named, remedy)]


def _file_problems(
    source: SourceEntry, path: Path, *, of_many: bool = False
) -> list[Problem]:
    """The problem of one file, as far as its directory entry shows it."""
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
        # Writers of many files leave some of them empty; a source that is empty as a whole is refused later.
        if of_many and source.type in ("jsonl", "text"):
            return []
        remedy = "Check how the file was made, or remove the source"
        return [Problem(where, "is empty", named, remedy)]
    if source.is_whole_files and found.st_size > LARGEST_DOCUMENT:
        return [too_large_document(path, f"{found.st_size} bytes", source)]
    if source.type != "tokens":
        return []

    # By the name alone: any bytes may be ids.
    if path.name.endswith(_PACKED_ENDINGS):
        why = "token ids are read where they lie, at any place"
        return [Problem(where, "is compressed", why, "Decompress it")]
    size, width = found.st_size, np.dtype(source.dtype).itemsize
    if size % width:
        why = f"its size, {size} bytes, is not a multiple of {width} ({source.field}.dtype is {source.dtype})"
        remedy = "Check the dtype; if it is right the file is truncated: copy it again"
        return [Problem(where, "ends within a token id", why, remedy)]
    if size < 2 * width:
        why = "one token predicts the next"
        return [Problem(where, "holds a single token id", why, "Give at least two tokens")]
    return _layout_problems(source, path)


def _layout_problems(source: SourceEntry, path: Path) -> list[Problem]:
    """The problem of a tokens file whose ids have another width or byte order than the manifest says."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError as error:
        return [_unreadable(source, path, error)]
    named = f"{source.field}.dtype is {source.dtype}"

    # Flat files have no header, so that one of another format shows only in what it begins with.
    if (kind := describe_header(head)) is not None:
        what, why = f"is {kind}", f"its header would be read as token ids; {named}"
        remedy = f"Write its ids alone: numpy.load(…).astype({source.dtype!r}).tofile(…)"
        return [Problem(str(path), what, why, remedy)]

    layout = find_layout(head, source.dtype)
    if layout is None:
        return []
    what = f"holds {layout.in_words} ids"
    why = f"bytes of its first ids are zero as in no other type; {named}, little-endian"
    remedy = (
        f"Convert it: {conversion(path, layout)}, and set {source.field}.dtype to uint32"
    )
    if layout.order == "<" and layout.width == 4:
        remedy = f"Set {source.field}.dtype to uint32"
    return [Problem(str(path), what, why, remedy)]


def too_large_document(path: Path, size: str, source: SourceEntry) -> Problem:
    """The problem of a file that is one document and does not fit into memory."""
    what = f"has {size}, and a document may have {LARGEST_DOCUMENT}"
    why = "each file is one document, which is in memory as a whole"
    remedy = f"Set {source.field}.document to line, or cut the file"
    return Problem(str(path), what, why, remedy)


def _unreadable(source: SourceEntry, path: Path, error: OSError) -> Problem:
    named = f"{source.field}.path names it"
    if isinstance(error, FileNotFoundError):
        remedy = "Check the path; it is relative to the manifest's directory"
        return Problem(str(path), "does not exist", named, remedy)
    # A volume that is away for a moment is no mistake of the manifest: another host may continue.
    why, remedy = f"{error.strerror} ({named})", "Check the path and its permissions"
    return Problem(
        str(path), "cannot be read", why, remedy, is_of_host=is_host_trouble(error)
    )
