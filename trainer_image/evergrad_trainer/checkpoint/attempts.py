"""Publishes checkpoints in a POSIX directory: fsync makes an attempt durable, a rename publishes it, and the
claims in ``gen/`` exclude older processes."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from evergrad_trainer.base.durable import fsync_directory, is_temporary, write_new
from evergrad_trainer.base.errors import FencedError
from evergrad_trainer.checkpoint import files, layout
from evergrad_trainer.checkpoint.catalog import Catalog
from evergrad_trainer.checkpoint.faults import (
    AFTER_RENAME,
    BEFORE_MANIFEST,
    BEFORE_RENAME,
    FaultPoints,
    NoFaults,
)
from evergrad_trainer.checkpoint.generations import check_fence
from evergrad_trainer.checkpoint.layout import Version, parse_attempt_name
from evergrad_trainer.checkpoint.manifest import FileEntry, Manifest, encode_manifest
from evergrad_trainer.checkpoint.reader import CheckpointReader
from evergrad_trainer.checkpoint.shard_file import ShardFile

STALE_SECONDS = 3.0
"""How long a new file of another node may remain invisible on a network volume before it counts as missing.
"""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Medium:
    """Properties of the volume.

    ``stale_seconds`` is how long a new file of another node may remain invisible. ``block_bytes`` is the size
    of a write. ``faults`` is a hook for tests.
    """

    stale_seconds: float = STALE_SECONDS
    block_bytes: int = files.BLOCK_BYTES
    faults: FaultPoints = field(default_factory=NoFaults)


class FilesystemAttempts:
    """Manages attempt directories under ``.tmp/`` and publishes them by rename.

    Readers cannot see an attempt until ``publish``. Rank 0 calls all methods except ``create_shard``, in the
    order ``begin``, ``write_document``, ``publish``, or ``discard`` after a failure. The methods raise
    OSError if an operation on the volume fails.
    """

    def __init__(
        self, directory: Path, *, catalog: Catalog, reader: CheckpointReader, medium: Medium
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._reader = reader
        self._medium = medium
        self._faults = medium.faults

    def begin(self, version: Version) -> str:
        """Create the directory of the attempt and return its name, which every rank needs.

        Raises FileExistsError if this version was attempted before.
        """
        # A version is unique and so is its directory, so no other attempt can write to it.
        name = layout.attempt_name(version)
        self._path(name).parent.mkdir(exist_ok=True)
        self._path(name).mkdir()
        return name

    def create_shard(self, attempt: str, rank: int) -> ShardFile:
        """Create the file of ``rank``, which must not exist. Called on each rank with tensors to write."""
        path = self._path(attempt) / layout.shard_name(rank)
        descriptor = files.open_seen(
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
        """Add a small file durably, and return its entry for the manifest."""
        write_new(self._path(attempt) / name, data)
        return FileEntry(name=name, bytes=len(data), hash=files.hash_bytes(data))

    def publish(self, attempt: str, manifest: Manifest) -> str:
        """Publish the attempt atomically and durably as a checkpoint, and return the name of the checkpoint.

        The order is manifest, fence, rename, fence. A page in docs/decisions explains this order. If the
        manifest's generation is not the newest, this raises FencedError and publishes nothing.
        """
        path, generation = self._path(attempt), manifest.version.generation
        is_renamed = False
        self._faults.reached(BEFORE_MANIFEST, 0)
        check_fence(self._directory, generation, fresh=True)
        write_new(path / layout.MANIFEST, encode_manifest(manifest))
        fsync_directory(path)
        self._faults.reached(BEFORE_RENAME, 0)
        check_fence(self._directory, generation, fresh=True)
        for name in layout.checkpoint_names(manifest.version):
            # If a restarted run saves the same state of the same step again, keep the existing checkpoint.
            if self._reader.holds(name, manifest):
                self.discard(attempt)
                break
            if is_renamed := files.rename_to_free_name(path, self._directory / name):
                break
        else:
            raise FileExistsError(f"every name for {manifest.version} is in use")
        self._faults.reached(AFTER_RENAME, 0)
        fsync_directory(self._directory)
        try:
            check_fence(self._directory, generation, fresh=True)
        except FencedError:
            # The newer process claimed the directory between the previous check and the rename. It may have
            # trained past this step already, so remove this checkpoint. Do not remove a checkpoint that
            # existed before, because the newer process may have loaded it.
            if is_renamed:
                self._catalog.remove(name)
            raise
        return name

    def discard(self, attempt: str) -> None:
        """Remove the directory of an attempt as far as possible."""
        if not files.remove_tree(self._path(attempt)):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._path(attempt),
            )

    def clean(self, generation: int) -> None:
        """Remove the files that killed processes of earlier generations have left. Called at each start."""
        for path in files.list_entries(self._directory / layout.ATTEMPTS):
            version = parse_attempt_name(path.name)
            # Another process may still be writing an attempt of this or a newer generation.
            if version is not None and version.generation < generation:
                self.discard(path.name)
        for path in files.list_entries(self._directory / layout.TRASH):
            files.remove_tree(path)
        for path in files.list_entries(self._directory):
            # If a process is killed while it writes a pointer, a temporary file remains.
            if any(is_temporary(path.name, of) for of in (layout.LATEST, layout.BEST)):
                path.unlink(missing_ok=True)

    def _path(self, attempt: str) -> Path:
        return self._directory / layout.ATTEMPTS / attempt
