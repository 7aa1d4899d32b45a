"""A store on a POSIX directory, local or shared between nodes: rename publishes, fsync makes durable,
``gen/`` fences."""

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from evergrad_trainer.checkpoint import files, layout
from evergrad_trainer.checkpoint.faults import (
    AFTER_RENAME,
    BEFORE_MANIFEST,
    BEFORE_RENAME,
    RETENTION,
    FaultPoints,
    NoFaults,
)
from evergrad_trainer.checkpoint.generations import check_fence, claim_generation
from evergrad_trainer.checkpoint.layout import (
    Version,
    parse_attempt_name,
    parse_checkpoint_name,
)
from evergrad_trainer.checkpoint.manifest import (
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    decode_manifest,
    encode_manifest,
)
from evergrad_trainer.checkpoint.shard_file import ShardFile
from evergrad_trainer.checkpoint.store import Candidate, Store
from evergrad_trainer.durable import fsync_directory, is_temporary, replace_durably, write_new
from evergrad_trainer.errors import FencedError

__all__ = [
    "FilesystemAttempts",
    "FilesystemFence",
    "FilesystemLibrary",
    "Medium",
    "check_fence",
    "claim_generation",
    "filesystem_store",
]

HASH_THREADS = 8
STALE_SECONDS = 3.0
"""How long another node's fresh file may stay unseen on a network volume before it counts as missing."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Medium:
    """How to treat the volume: how long a fresh file may stay unseen, how much is written at once, what tests
    do in between."""

    stale_seconds: float = STALE_SECONDS
    block_bytes: int = files.BLOCK_BYTES
    faults: FaultPoints = field(default_factory=NoFaults)


def filesystem_store(directory: Path, *, medium: Medium | None = None) -> Store:
    """The store in ``directory`` (a run's ``checkpoints``)."""
    medium = medium or Medium()
    library = FilesystemLibrary(directory, medium)
    attempts = FilesystemAttempts(directory, library=library, medium=medium)
    return Store(
        attempts=attempts,
        library=library,
        fence=FilesystemFence(directory),
        faults=medium.faults,
    )


class FilesystemFence:
    """The ``gen/`` directory, asked between saves."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def check(self, generation: int) -> None:
        """Raise FencedError if a newer generation has been claimed."""
        check_fence(self._directory, generation)


class ShardSource:
    """One file of a published checkpoint, open for reading."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``; the interpreter lock is free meanwhile."""
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                raise InvalidCheckpointError(f"file {self._name}: ends at byte {offset}")
            buffer = buffer[count:]
            offset += count


class FilesystemAttempts:
    """Attempt directories under ``.tmp/`` and their publication by rename."""

    def __init__(
        self, directory: Path, *, library: "FilesystemLibrary", medium: Medium
    ) -> None:
        self._directory = directory
        self._library = library
        self._medium = medium
        self._faults = medium.faults

    def begin(self, version: Version) -> str:
        """Make the attempt's directory; FileExistsError if this version was attempted before."""
        name = layout.attempt_name(version)
        self._path(name).parent.mkdir(exist_ok=True)
        self._path(name).mkdir()
        return name

    def create_shard(self, attempt: str, rank: int) -> ShardFile:
        """Create ``rank``'s file."""
        path = self._path(attempt) / layout.shard_name(rank)
        descriptor = _open_seen(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self._medium.stale_seconds
        )
        return ShardFile(
            descriptor,
            path,
            rank=rank,
            faults=self._faults,
            block_bytes=self._medium.block_bytes,
        )

    def write_document(self, attempt: str, name: str, data: bytes) -> FileEntry:
        """Add a small file."""
        write_new(self._path(attempt) / name, data)
        return FileEntry(name=name, bytes=len(data), hash=files.hash_bytes(data))

    def publish(self, attempt: str, manifest: Manifest) -> str:
        """Manifest, fence, rename, fence: see the module's decision page for why in this order."""
        path, generation = self._path(attempt), manifest.version.generation
        self._faults.reached(BEFORE_MANIFEST, 0)
        check_fence(self._directory, generation, fresh=True)
        write_new(path / layout.MANIFEST, encode_manifest(manifest))
        fsync_directory(path)
        self._faults.reached(BEFORE_RENAME, 0)
        check_fence(self._directory, generation, fresh=True)
        name = self._rename(attempt, manifest)
        self._faults.reached(AFTER_RENAME, 0)
        fsync_directory(self._directory)
        try:
            check_fence(self._directory, generation, fresh=True)
        except FencedError:
            # The claim came between the last look and the rename. The newer process may already be past this
            # step on its own.
            self._library.remove(name)
            raise
        return name

    def discard(self, attempt: str) -> None:
        """Remove an attempt's directory."""
        if not files.remove_tree(self._path(attempt)):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._path(attempt),
            )

    def clean(self, generation: int) -> None:
        """Remove attempts of smaller generations, and what is left in the trash."""
        for path in _entries(self._directory / layout.ATTEMPTS):
            version = parse_attempt_name(path.name)
            if version is not None and version.generation < generation:
                self.discard(path.name)
        for path in _entries(self._directory / layout.TRASH):
            files.remove_tree(path)
        for path in _entries(self._directory):
            # A kill in the middle of writing a pointer leaves its temporary file.
            if any(is_temporary(path.name, of) for of in (layout.LATEST, layout.BEST)):
                path.unlink(missing_ok=True)

    def _rename(self, attempt: str, manifest: Manifest) -> str:
        for name in layout.checkpoint_names(manifest.version):
            if self._library.holds(name, manifest):
                self.discard(attempt)
                return name
            if files.rename_to_free_name(self._path(attempt), self._directory / name):
                return name
        raise FileExistsError(f"every name for {manifest.version} is taken")

    def _path(self, attempt: str) -> Path:
        return self._directory / layout.ATTEMPTS / attempt


class FilesystemLibrary:
    """Published checkpoints: directories ``step-N`` with a manifest."""

    def __init__(self, directory: Path, medium: Medium) -> None:
        self._directory = directory
        self._faults = medium.faults
        self._stale_seconds = medium.stale_seconds

    def scan(self) -> list[Candidate]:
        """All published names, newest first."""
        names = {
            path.name for path in _entries(self._directory) if parse_checkpoint_name(path.name)
        }
        hint = self.latest()
        if hint is not None and (self._directory / hint).is_dir():
            names.add(hint)  # a listing on a network volume may be older than the hint
        return sorted(
            (self.describe(name) for name in names),
            key=lambda candidate: candidate.version,
            reverse=True,
        )

    def describe(self, name: str) -> Candidate:
        """One published name, whether or not it is among those a scan finds."""
        named = parse_checkpoint_name(name) or Version(0, 0, 0)
        try:
            manifest = self.read_manifest(name)
        except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
            return Candidate(name, named, None, str(error))
        return Candidate(name, manifest.version, manifest)

    def set_aside(self) -> list[str]:
        """Names in quarantine."""
        return sorted(path.name for path in _entries(self._directory / layout.QUARANTINE))

    def validate(
        self, name: str, *, checksums: bool, meter: files.Meter | None = None
    ) -> Manifest:
        """Check sizes, then hashes (of the small files always), several files at a time."""
        manifest = self.read_manifest(name)
        if meter is not None:
            meter.add()
        for file in manifest.files:
            self._check_size(name, file)
        hashed = [file for file in manifest.files if checksums or file.name == layout.TENSORS]
        with ThreadPoolExecutor(
            max_workers=HASH_THREADS, thread_name_prefix="checkpoint-hash"
        ) as pool:
            hashes = pool.map(
                lambda file: files.hash_file(self._directory / name / file.name, meter=meter),
                hashed,
            )
            for file, found in zip(hashed, hashes, strict=True):
                if found != file.hash:
                    raise InvalidCheckpointError(f"file {file.name}: checksum differs")
        return manifest

    def holds(self, name: str, manifest: Manifest) -> bool:
        """Whether ``name`` exists, validates and has the content that ``manifest`` describes."""
        if not os.path.lexists(self._directory / name):
            return False
        try:
            return self.validate(name, checksums=True).has_same_content(manifest)
        except (InvalidCheckpointError, UnknownFormatError):
            return False

    def read_manifest(self, name: str, *, patient: bool = False) -> Manifest:
        """The manifest alone, opened by name: a listing may be stale, an open is not."""
        data = self._read(name, layout.MANIFEST, patient=patient)
        manifest = decode_manifest(data)
        named = parse_checkpoint_name(name)
        if named is not None and named.step != manifest.version.step:
            raise InvalidCheckpointError(
                f"file {layout.MANIFEST}: is of step {manifest.version.step}"
            )
        return manifest

    def read_document(self, name: str, file: FileEntry) -> bytes:
        """A small file's content."""
        data = self._read(name, file.name, patient=True)
        if files.hash_bytes(data) != file.hash:
            raise InvalidCheckpointError(f"file {file.name}: checksum differs")
        return data

    @contextlib.contextmanager
    def open_shard(self, name: str, file: str) -> Iterator[ShardSource]:
        """Open a file for reading."""
        try:
            descriptor = _open_seen(
                self._directory / name / file, os.O_RDONLY, self._stale_seconds
            )
        except FileNotFoundError as error:
            raise InvalidCheckpointError(f"file {file}: is missing") from error
        try:
            yield ShardSource(descriptor, file)
        finally:
            os.close(descriptor)

    def quarantine(self, name: str) -> str:
        """Rename into ``quarantine/``, under a further number if the name was set aside before."""
        (self._directory / layout.QUARANTINE).mkdir(exist_ok=True)
        return self._rename_into(layout.QUARANTINE, name)

    def remove(self, name: str) -> None:
        """Rename into ``.trash/``, then delete. A kill in between leaves rubbish, never half a checkpoint."""
        (self._directory / layout.TRASH).mkdir(exist_ok=True)
        trashed = self._rename_into(layout.TRASH, name)
        self._faults.reached(RETENTION, 0)
        if not files.remove_tree(self._directory / trashed):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._directory / trashed,
            )

    def mark_latest(self, name: str, version: Version) -> None:
        """Write ``latest``."""
        replace_durably(self._directory / layout.LATEST, _encode_pointer(name, version))

    def mark_best(self, name: str, version: Version) -> None:
        """Write ``best.json``."""
        replace_durably(self._directory / layout.BEST, _encode_pointer(name, version))

    def latest(self) -> str | None:
        """The name in ``latest``."""
        return _read_pointer(self._directory / layout.LATEST)

    def best(self) -> str | None:
        """The name in ``best.json``."""
        return _read_pointer(self._directory / layout.BEST)

    def locate(self, name: str) -> str:
        """The checkpoint's directory."""
        return str(self._directory / name)

    def _check_size(self, name: str, file: FileEntry) -> None:
        try:
            found = os.stat(self._directory / name / file.name).st_size
        except FileNotFoundError as error:
            raise InvalidCheckpointError(f"file {file.name}: is missing") from error
        if found != file.bytes:
            raise InvalidCheckpointError(
                f"file {file.name}: has {found} bytes, {file.bytes} were written"
            )

    def _read(self, name: str, file: str, *, patient: bool) -> bytes:
        stale_seconds = self._stale_seconds if patient else 0.0
        try:
            descriptor = _open_seen(self._directory / name / file, os.O_RDONLY, stale_seconds)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InvalidCheckpointError(f"file {file}: is missing") from error
        with open(descriptor, "rb") as stream:
            return stream.read()

    def _rename_into(self, folder: str, name: str) -> str:
        number = 1
        while True:
            moved = f"{folder}/{name}" if number == 1 else f"{folder}/{name}~{number}"
            if files.rename_to_free_name(self._directory / name, self._directory / moved):
                fsync_directory(self._directory)
                return moved
            number += 1


def _open_seen(path: Path, flags: int, stale_seconds: float) -> int:
    """Open a file whose directory another node has just made: it may take a moment to be seen."""
    deadline = time.monotonic() + stale_seconds
    while True:
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


def _encode_pointer(name: str, version: Version) -> bytes:
    return json.dumps({"checkpoint": name, **asdict(version)}).encode() + b"\n"


def _read_pointer(path: Path) -> str | None:
    try:
        pointer: Any = json.loads(path.read_bytes())
        name = pointer["checkpoint"]
    except (OSError, ValueError, TypeError, KeyError):
        return None  # a hint that cannot be read is no hint
    return name if isinstance(name, str) and parse_checkpoint_name(name) else None
