"""From an attempt to a published checkpoint, on a POSIX directory: rename publishes, fsync makes durable,
``gen/`` fences."""

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
"""How long another node's fresh file may stay unseen on a network volume before it counts as missing."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Medium:
    """How to treat the volume: how long a fresh file may stay unseen, how much is written at once, and what
    tests do in between."""

    stale_seconds: float = STALE_SECONDS
    block_bytes: int = files.BLOCK_BYTES
    faults: FaultPoints = field(default_factory=NoFaults)


class FilesystemAttempts:
    """Attempt directories under ``.tmp/`` and their publication by rename.

    An attempt is invisible to readers until ``publish``. Rank 0 calls all methods but ``create_shard``, in
    the order begin, write_document, publish, or discard after a failure. They raise OSError for what the
    volume refuses.
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
        """Make the attempt's directory; its name, by which every rank reaches it.

        Raises FileExistsError if this version was attempted before.
        """
        # A version is unique, and so is its directory: nothing of another attempt can get into it.
        name = layout.attempt_name(version)
        self._path(name).parent.mkdir(exist_ok=True)
        self._path(name).mkdir()
        return name

    def create_shard(self, attempt: str, rank: int) -> ShardFile:
        """Create ``rank``'s file, which must not exist. Called on every rank that has tensors to write."""
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
        """Add a small file, durable when this returns."""
        write_new(self._path(attempt) / name, data)
        return FileEntry(name=name, bytes=len(data), hash=files.hash_bytes(data))

    def publish(self, attempt: str, manifest: Manifest) -> str:
        """Make the attempt a checkpoint, all at once and for good; its name.

        Manifest, fence, rename, fence: docs/decisions has the reason for this order. Raises FencedError, and
        leaves nothing of this attempt published, if the manifest's generation is not the newest.
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
            # The same state of the same step, saved again after a restart, is one checkpoint.
            if self._reader.holds(name, manifest):
                self.discard(attempt)
                break
            if is_renamed := files.rename_to_free_name(path, self._directory / name):
                break
        else:
            raise FileExistsError(f"every name for {manifest.version} is taken")
        self._faults.reached(AFTER_RENAME, 0)
        fsync_directory(self._directory)
        try:
            check_fence(self._directory, generation, fresh=True)
        except FencedError:
            # The claim came between the last look and the rename. The newer process may already be past this
            # step on its own. What was published before may be what it continues from.
            if is_renamed:
                self._catalog.remove(name)
            raise
        return name

    def discard(self, attempt: str) -> None:
        """Remove an attempt's directory, as far as it goes."""
        if not files.remove_tree(self._path(attempt)):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._path(attempt),
            )

    def clean(self, generation: int) -> None:
        """Remove what killed processes of generations below ``generation`` left behind. Called at a start."""
        for path in files.list_entries(self._directory / layout.ATTEMPTS):
            version = parse_attempt_name(path.name)
            # One of this generation or a newer one may be under way in another process.
            if version is not None and version.generation < generation:
                self.discard(path.name)
        for path in files.list_entries(self._directory / layout.TRASH):
            files.remove_tree(path)
        for path in files.list_entries(self._directory):
            # A kill in the middle of writing a pointer leaves its temporary file.
            if any(is_temporary(path.name, of) for of in (layout.LATEST, layout.BEST)):
                path.unlink(missing_ok=True)

    def _path(self, attempt: str) -> Path:
        return self._directory / layout.ATTEMPTS / attempt
