"""Reading published checkpoints by name, on any rank: manifests, small files, shards, and their checks."""

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
"""Bytes of one copy from memory, which holds the interpreter lock: other threads get it in between."""


class ShardSource(Protocol):
    """One file of a published checkpoint, wherever its bytes are."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``. Raises InvalidCheckpointError if the file is too short."""


class MemorySource:
    """A file that was read and hashed already, and is loaded from memory."""

    def __init__(self, data: memoryview, name: str) -> None:
        self._data = data
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Copy from ``offset`` on. Raises InvalidCheckpointError if the file is too short."""
        part = self._data[offset : offset + len(buffer)]
        if len(part) < len(buffer):
            raise InvalidCheckpointError(
                f"file {self._name}: ends at byte {len(self._data)}"
            )
        for begin in range(0, len(part), COPY_BYTES):
            piece = part[begin : begin + COPY_BYTES]
            buffer[begin : begin + len(piece)] = piece
            # Counted again, as bytes from a file are: whoever watches this process sees that it goes on.
            MOVED.note(len(piece))


class FileSource:
    """One file of a published checkpoint, open for reading."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self._name = name

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``; the interpreter lock is free meanwhile.

        Raises InvalidCheckpointError if the file is too short.
        """
        # A call may give less than was asked for; nothing at all means the end of the file.
        while buffer:
            count = os.preadv(self._descriptor, [buffer], offset)
            if count == 0:
                raise InvalidCheckpointError(f"file {self._name}: ends at byte {offset}")
            MOVED.note(count)
            buffer = buffer[count:]
            offset += count


class CheckpointReader:
    """The content of the checkpoints in one directory. Changes nothing.

    Methods raise InvalidCheckpointError for damage, UnknownFormatError for a newer program's checkpoint, and
    OSError for a volume that cannot be read.
    """

    def __init__(self, directory: Path, *, stale_seconds: float) -> None:
        """``stale_seconds``: how long another node's fresh file may stay unseen from here."""
        self._directory = directory
        self._stale_seconds = stale_seconds
        self._held: HeldFiles | None = None

    @contextlib.contextmanager
    def holding(self, held: HeldFiles) -> Iterator[None]:
        """Keep what is validated meanwhile in ``held``, as far as there is room, and load from there.

        Each byte is then read once, and the loaded bytes are those that were hashed.
        """
        self._held = held
        try:
            yield
        finally:
            self._held = None

    def locate(self, name: str) -> str:
        """The checkpoint's directory, for messages."""
        return str(self._directory / name)

    def read_manifest(self, name: str, *, patient: bool = False) -> Manifest:
        """The manifest alone, opened by name: a listing may be stale, an open is not.

        ``patient``: the checkpoint is known to exist, so that this waits a moment until it is seen from here.
        """
        data = self._read(name, layout.MANIFEST, patient=patient)
        manifest = decode_manifest(data)
        # A directory that was renamed by hand would bring the run to another step than its name says.
        named = parse_checkpoint_name(name)
        if named is not None and named.step != manifest.version.step:
            raise InvalidCheckpointError(
                f"file {layout.MANIFEST}: is of step {manifest.version.step}"
            )
        return manifest

    def read_document(self, name: str, file: FileEntry) -> bytes:
        """A small file's content, checked against its hash."""
        held = self._find_held(name, file.name)
        data = self._read(name, file.name, patient=True) if held is None else bytes(held)
        if files.hash_bytes(data) != file.hash:
            raise InvalidCheckpointError(f"file {file.name}: checksum differs")
        return data

    @contextlib.contextmanager
    def open_shard(self, name: str, file: str) -> Iterator[ShardSource]:
        """Open a file by its name in the manifest."""
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
        """Check that every file is there with its size, and with ``checksums`` its hash.

        ``meter`` counts what has been read, so that others can see whether it continues.
        """
        manifest = self.read_manifest(name)
        if meter is not None:
            meter.add()

        # Sizes first: they cost one call a file and show most of what goes wrong.
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

        # The small table is always hashed: a flipped bit in it would load a tensor from a wrong place. The
        # same holds for: what was read ahead, which has its hash already. Several files at a time, since one
        # alone waits for the disk.
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
        """Whether ``name`` exists, validates and has the content that ``manifest`` describes."""
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
