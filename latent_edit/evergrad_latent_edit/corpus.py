"""Reads the manifest of a corpus: its snapshot id, and its files with their splits, checked by size and
SHA-256."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final, Literal

from evergrad_manifest.errors import Problem, raise_if
from evergrad_manifest.training.pretrain import HELD_OUT, NAME_PATTERN
from evergrad_trainer.base.errors import DataError

MANIFEST: Final = "dataset_manifest.json"
TRAIN: Final = "train"
_CORPUS: Final = "spec.training.latentEdit.corpus"
_WINDOWS: Final = "spec.training.latentEdit.windows"
_MOST_PROBLEMS: Final = 20
_LONGEST_SPLIT: Final = 63
_BLOCK: Final = 2**20
_HASH: Final = re.compile(r"(sha256:)?([0-9a-f]{64})")

Kind = Literal["placed", "carbon", "population", "clinical"]
_KINDS: Final[dict[str, Kind]] = {
    "placed": "placed",
    "carbon": "carbon",
    "gnomad": "population",
    "clinvar": "clinical",
}
"""Folder of a file → kind of its contents. Files in other folders are checked but not read."""


@dataclass(frozen=True)
class CorpusFile:
    """A file that the manifest lists.

    ``name`` is the path relative to the corpus's folder, as shown in messages. For example,
    ``placed/train.jsonl``. ``split`` is None if the file belongs to all splits, and ``records`` is None if
    the manifest does not state the number of records.
    """

    name: str
    path: Path
    kind: Kind | None
    split: str | None
    records: int | None
    sha256: str

    @property
    def is_train(self) -> bool:
        """Whether the file is trained on: it has no split, or the split's name begins with ``train``."""
        return self.split is None or self.split.startswith(TRAIN)


@dataclass(frozen=True)
class Corpus:
    """A corpus whose files match its manifest. ``hash`` is the SHA-256 of the manifest itself."""

    folder: Path
    snapshot_id: str
    hash: str
    files: tuple[CorpusFile, ...]

    def windows(self) -> list[CorpusFile]:
        """Return the files that contain windows."""
        return [one for one in self.files if one.kind in ("placed", "carbon")]

    def tables(self, family: str) -> list[CorpusFile]:
        """Return the files with the edits of ``family``."""
        return [one for one in self.files if one.kind == family]


def read_corpus(folder: Path, *, windows: str | None) -> Corpus:
    """Read the corpus in ``folder`` and check each of its files.

    ``windows`` is the folder of windows to read, ``placed`` or ``carbon``; None if the corpus has only one of
    them. Raises DataError with up to 20 problems if the manifest or a file is not valid.
    """
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        why = f"{_CORPUS} names a folder with this file"
        raise DataError(Problem(str(path), what, why, "Check the path")) from None
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise DataError(
            Problem(str(path), "is no JSON", str(error), "Write it again")
        ) from None
    if not isinstance(raw, Mapping):
        why = "it is an object with snapshot_id and files"
        raise DataError(Problem(str(path), "holds no object", why, "Write it again"))

    problems: list[Problem] = []
    snapshot = raw.get("snapshot_id")
    if not isinstance(snapshot, str) or not snapshot.strip():
        why = "it names the state of the corpus that a run was trained on"
        what = "snapshot_id is missing" if snapshot is None else "snapshot_id is not a text"
        problems.append(Problem(str(path), what, why, "Add it, such as corpus-2026-05-01"))
    files: list[CorpusFile] = []
    for found in _read_entries(raw.get("files"), folder, path):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            files.append(found)
    # Refuse files that the manifest does not list, because they would not be read. Skip this check if the
    # manifest has problems itself, because its list is then incomplete.
    listed = {one.name for one in files}
    for kind in _KINDS if not problems else ():
        for file in sorted((folder / kind).rglob("*")):
            name = file.relative_to(folder).as_posix()
            if file.suffix in (".jsonl", ".parquet") and name not in listed:
                what = "is not a part of the corpus"
                why = f"{path.name} does not list it, and it would not be read"
                problems.append(Problem(str(file), what, why, "List it, or move it"))
    raise_if(problems[:_MOST_PROBLEMS], DataError)
    chosen = _choose_windows(files, windows, path)
    return Corpus(folder, str(snapshot), hashlib.sha256(text).hexdigest(), tuple(chosen))


def _choose_windows(
    files: list[CorpusFile], windows: str | None, path: Path
) -> list[CorpusFile]:
    """Return the files without the windows of the folder that is not used.

    If both folders exist, the manifest of the run must name one of them; the choice is never implicit.
    """
    there = {one.kind for one in files if one.kind in ("placed", "carbon")}
    if windows is None and len(there) == 2:
        why = "windows with coordinates and windows without are two data sets"
        remedy = "Set it to placed or carbon"
        what = f"missing, and {path} lists files of placed/ and of carbon/"
        raise DataError(Problem(_WINDOWS, what, why, remedy))
    if not there or (windows is not None and windows not in there):
        wanted = f"{windows}/" if windows else "placed/ or carbon/"
        why = "windows are what is edited"
        raise DataError(
            Problem(
                str(path), f"lists no file of {wanted}", why, "Add JSON Lines files there"
            )
        )
    unused = {"placed", "carbon"} - ({windows} if windows else there)
    return [one for one in files if one.kind not in unused]


def _read_entries(
    entries: Any, folder: Path, manifest: Path
) -> Iterator[CorpusFile | Problem]:
    if not isinstance(entries, list) or not entries:
        what = "files is no list with an entry"
        yield Problem(
            str(manifest), what, "it lists what the corpus consists of", "List its files"
        )
        return
    names: set[str] = set()
    for index, entry in enumerate(entries):
        where = f"{manifest}: files[{index}]"
        found = _read_entry(entry, folder, where)
        if isinstance(found, CorpusFile):
            if found.name in names:
                why = "each file has one entry, with one checksum"
                yield Problem(
                    f"{where}.path", f"{found.name} is listed twice", why, "Remove one"
                )
                continue
            names.add(found.name)
        yield found


def _read_entry(entry: Any, folder: Path, where: str) -> CorpusFile | Problem:
    """Compare a file with its entry in the manifest; return the file, or the problem."""
    if not isinstance(entry, Mapping):
        return Problem(
            where, "is not an object", "an entry has at least path and sha256", "Write one"
        )
    name, split, records = (entry.get(key) for key in ("path", "split", "records"))
    if isinstance(name, str) and (reason := why_unsafe(name)):
        why = "a corpus consists of files of its own folder"
        return Problem(f"{where}.path", f"{name!r} {reason}", why, "Write a relative path")
    if not isinstance(name, str) or not name:
        return Problem(f"{where}.path", "is not a text", "it names a file", "Add it")
    # The split's name becomes the name of an evaluation set and of its metrics.
    field = f"{where}.split"
    if split is not None and (not isinstance(split, str) or not split):
        return Problem(field, "is not a text", "it names a part", "Write one, or remove it")
    if split and (len(split) > _LONGEST_SPLIT or not re.fullmatch(NAME_PATTERN, split)):
        why = "an evaluation set gets this name: letters, digits, '-', '_' and '.'"
        return Problem(field, f"{split[:80]!r} is no name", why, "Rename the split")
    if split and split.casefold() == HELD_OUT.casefold():
        why = "it is the set of what latentEdit.holdOut meets"
        return Problem(field, f"{split!r} is taken", why, "Rename the split")
    is_count = isinstance(records, int) and not isinstance(records, bool) and records >= 0
    if records is not None and not is_count:
        return Problem(f"{where}.records", "is no count", "", "Correct it, or remove it")

    # Resolve the path, because a link may lead out of the folder.
    path = folder / name
    if not path.is_file():
        return Problem(
            str(path), "does not exist", f"{where} lists it", "Copy the corpus again"
        )
    if not path.resolve().is_relative_to(folder.resolve()):
        why = "a corpus consists of files of its own folder"
        return Problem(
            str(path), "leads out of the folder", why, "Copy the file to its place"
        )
    try:
        problem = _compare(entry, path, where)
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
        problem = Problem(
            str(path), what, f"{where} lists it", "Check its rights, and the disk"
        )
    if problem is not None:
        return problem
    kind = _KINDS.get(PurePosixPath(name).parts[0])
    return CorpusFile(name, path, kind, split, records, str(entry["sha256"])[-64:])


def why_unsafe(name: str) -> str:
    """Return why ``name`` is not a valid path within a folder, or an empty string if it is valid.

    For example, ``../a`` returns ``has a parent segment``.
    """
    pure = PurePosixPath(name)
    if pure.is_absolute() or "\\" in name or ":" in name.partition("/")[0]:
        return "is not relative"
    if ".." in pure.parts:
        return "has a parent segment"
    if pure.as_posix() != name or any(ord(one) < 32 for one in name):
        return "is not written in its plain form"
    return ""


def _compare(entry: Mapping[str, Any], path: Path, where: str) -> Problem | None:
    """Return the difference between a file and its entry, or None if they match."""
    claimed = entry.get("sha256")
    match = _HASH.fullmatch(claimed) if isinstance(claimed, str) else None
    if match is None:
        why = "what was trained on is known by its content"
        what = "is missing" if claimed is None else "is not a SHA-256"
        return Problem(
            f"{where}.sha256", what, why, "Write its 64 hex digits, as sha256sum does"
        )
    size, real = entry.get("size_bytes"), path.stat().st_size
    remedy = "Copy the file again, or make the corpus's manifest anew"
    if size is not None and size != real:
        return Problem(str(path), f"has {real:,} bytes", f"{where} says {size}", remedy)
    if (found := hash_file(path)) != match[2]:
        what = f"has the SHA-256 {found}"
        return Problem(str(path), what, f"{where} says {match[2]}", remedy)
    return None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file as 64 hex digits. Raises OSError if the file cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
