"""Reads and validates published checkpoints by name, on any rank: manifests, small files and shards."""

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.checkpoint import files, layout
from evergrad_trainer.checkpoint.cached_files import HeldFiles
from evergrad_trainer.checkpoint.layout import parse_checkpoint_name
from evergrad_trainer.checkpoint.manifest import (
    FileEntry,
    InvalidCheckpointError,
    Manifest,
    UnknownFormatError,
    decode_manifest,
)

HASH_THREADS = 8
COPY_BYTES = 16 * 2**20
"""Bytes per copy from memory. A copy holds the GIL; other threads can acquire it between two copies."""


class ShardSource(Protocol):
    """One file of a published checkpoint, on the volume or in memory."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from byte ``offset``. Raises InvalidCheckpointError if the file is too short."""


class MemorySource:
    """A file in memory that was already read and hashed."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from byte ``offset``. Raises InvalidCheckpointError if the file is too short."""
        part = self._data[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise InvalidCheckpointError(
                f"file {self._name}: ends at byte {len(self._data)}"
            )
        for begin in range(0, len(part), COPY_BYTES):
            piece = part[begin : begin + COPY_BYTES]
            buffer[begin : begin + len(piece)] = piece
            # Report these bytes again, like bytes from a file, to show progress.
            MOVED.note(len(piece))


class FileSource:
    """One file of a published checkpoint, open for reading."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from byte ``offset``. The GIL is released during the read.

        Raises InvalidCheckpointError if the file is too short.
        """
        # A call may return fewer bytes than requested. Zero bytes mean the end of the file.
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                raise InvalidCheckpointError(f"file {self._name}: ends at byte {offset}")
            MOVED.note(count)
            buffer = buffer[count:]
            offset += count


class CheckpointReader:
    """Read-only access to the checkpoints in one directory.

    The methods raise InvalidCheckpointError if a checkpoint is damaged, UnknownFormatError if a newer program
    wrote it, and OSError if the volume cannot be read.
    """

    def __init__(self, directory: Path, *, stale_seconds: float) -> None:
        """``stale_seconds`` is how long a new file of another node may remain invisible on this node."""
        self._directory = directory
        self._stale_seconds = stale_seconds
        self._held: HeldFiles | None = None

    @contextlib.contextmanager
    def holding(self, held: HeldFiles) -> Iterator[None]:
        """Keep files that are validated during the body in ``held``, if there is room, and load from there.

        Each byte is then read only once, and the loaded bytes are the hashed bytes.
        """
        self._held = held
        try:
            yield
        finally:
            self._held = None

    def locate(self, name: str) -> str:
        """Return the path of a checkpoint's directory, for messages."""
        return str(self._directory / name)

    def read_manifest(self, name: str, *, patient: bool = False) -> Manifest:
        """Return the manifest of a checkpoint.

        The manifest is opened by name, because a listing may be stale. If the checkpoint is known to exist,
        pass ``patient`` to wait up to ``stale_seconds`` until it is visible on this node.
        """
        data = self._read(name, layout.MANIFEST, patient=patient)
        manifest = decode_manifest(data)
        # If a user has renamed the directory, the run would continue at a different step than the name says.
        named = parse_checkpoint_name(name)
        if named is not None and named.step != manifest.version.step:
            raise InvalidCheckpointError(
                f"file {layout.MANIFEST}: is of step {manifest.version.step}"
            )
        return manifest

    def read_document(self, name: str, file: FileEntry) -> bytes:
        """Return the content of a small file after a check of its hash."""
        held = self._find_held(name, file.name)
        data = self._read(name, file.name, patient=True) if held is None else bytes(held)
        if files.hash_bytes(data) != file.hash:
            raise InvalidCheckpointError(f"file {file.name}: checksum differs")
        return data

    @contextlib.contextmanager
    def open_shard(self, name: str, file: str) -> Iterator[ShardSource]:
        """Open a file by its name in the manifest, from memory if it is held there."""
        held = self._find_held(name, file)
        if held is not None:
            yield MemorySource(held, file)
            return
        try:
            descriptor = files.open_seen(
                self._directory / name / file, os.O_RDONLY, self._stale_seconds
            )
        except FileNotFoundError as error:
            raise InvalidCheckpointError(f"file {file}: is missing") from error
        try:
            yield FileSource(descriptor, file)
        finally:
            os.close(descriptor)

    def validate(
        self, name: str, *, checksums: bool, meter: files.Meter | None = None
    ) -> Manifest:
        """Validate a checkpoint and return its manifest.

        Every file must exist with the right size and, with ``checksums``, the right hash.
        ``meter`` counts the blocks that have been read, so that another thread can check for progress.
        """
        manifest = self.read_manifest(name)
        if meter is not None:
            meter.add()

        # Check sizes first, because they need only one call per file and reveal most problems.
        for file in manifest.files:
            try:
                found = os.stat(self._directory / name / file.name).st_size
            except FileNotFoundError as error:
                raise InvalidCheckpointError(f"file {file.name}: is missing") from error
            if found != file.bytes:
                raise InvalidCheckpointError(
                    f"file {file.name}: has {found} bytes, {file.bytes} were written"
                )

        if self._held is not None:
            self._held.wait(meter)
            self._held.keep_only(self._directory / name)

        # The small table is always checked, because a flipped bit could load a tensor from a wrong offset.
        # Files that were read ahead are also checked, because their hashes are already known. Several files
        # are hashed in parallel, because a single thread would mostly wait for the disk.
        folder, held = self._directory / name, self._held
        hashed = [
            file
            for file in manifest.files
            if checksums
            or file.name == layout.TENSORS
            or (held is not None and held.has(folder / file.name))
        ]

        def matches(file: FileEntry) -> bool:
            path = folder / file.name
            if held is None:
                return files.hash_file(path, meter=meter) == file.hash
            return held.matches(path, file.hash, meter=meter)

        with ThreadPoolExecutor(
            max_workers=HASH_THREADS, thread_name_prefix="checkpoint-hash"
        ) as pool:
            for file, is_equal in zip(hashed, pool.map(matches, hashed), strict=True):
                if not is_equal:
                    raise InvalidCheckpointError(f"file {file.name}: checksum differs")
        return manifest

    def holds(self, name: str, manifest: Manifest) -> bool:
        """Return whether ``name`` exists, validates and has the same content as ``manifest``."""
        if not os.path.lexists(self._directory / name):
            return False
        try:
            return self.validate(name, checksums=True).has_same_content(manifest)
        except (InvalidCheckpointError, UnknownFormatError):
            return False

    def _find_held(self, name: str, file: str) -> memoryview | None:
        return (
            None if self._held is None else self._held.find(self._directory / name / file)
        )

    def _read(self, name: str, file: str, *, patient: bool) -> bytes:
        stale_seconds = self._stale_seconds if patient else 0.0
        try:
            descriptor = files.open_seen(
                self._directory / name / file, os.O_RDONLY, stale_seconds
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InvalidCheckpointError(f"file {file}: is missing") from error
        with open(descriptor, "rb") as stream:
            return stream.read()
