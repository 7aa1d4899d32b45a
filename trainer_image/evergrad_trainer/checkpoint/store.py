"""What a place for checkpoints must be able to do. The shared volume is one (``filesystem.py``); no torch
here.

A store knows names and bytes. Tensors are ``dcp_storage.py``'s matter, policy (when, how many, what to do
about a failure) is ``manager.py``'s. All methods but those of ShardWriter and ShardReader run on rank 0
unless they say otherwise, and raise OSError for whatever the medium refuses.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from evergrad_trainer.checkpoint.faults import FaultPoints
from evergrad_trainer.checkpoint.files import Meter
from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import FileEntry, Manifest


@dataclass(frozen=True)
class Candidate:
    """A published name; ``manifest`` is None where it cannot be read, and ``reason`` then says why."""

    name: str
    version: Version
    manifest: Manifest | None
    reason: str = ""


class ShardWriter(Protocol):
    """One rank's file in an attempt."""

    def append(self, data: memoryview) -> int:
        """Write ``data`` after what is there, aligned; its offset in the file."""

    def finish(self) -> FileEntry:
        """Make the file durable and close it."""

    def abandon(self) -> None:
        """Close the file in an error's path; never raises."""


class ShardReader(Protocol):
    """One file of a published checkpoint."""

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset``. Raises InvalidCheckpointError if the file is too short."""


class Attempts(Protocol):
    """The way to a published checkpoint. An attempt is invisible to readers until ``publish``."""

    def begin(self, version: Version) -> str:
        """Open a fresh attempt; its name, by which every rank reaches it."""

    def create_shard(self, attempt: str, rank: int) -> ShardWriter:
        """Begin ``rank``'s file, which must not exist. On any rank."""

    def write_document(self, attempt: str, name: str, data: bytes) -> FileEntry:
        """Add a small file, durable when this returns."""

    def publish(self, attempt: str, manifest: Manifest) -> str:
        """Make the attempt a checkpoint, all at once and for good; its name.

        Raises FencedError, and leaves nothing published, if the manifest's generation is not the newest.
        """

    def discard(self, attempt: str) -> None:
        """Remove an attempt, as far as it goes."""

    def clean(self, generation: int) -> None:
        """Remove what killed processes of generations below ``generation`` left behind."""


class Library(Protocol):
    """Published checkpoints. Reading methods work on any rank."""

    def scan(self) -> list[Candidate]:
        """All published names, newest first, valid or not. Empty if the directory does not exist."""

    def describe(self, name: str) -> Candidate:
        """One name, whether or not a scan finds it."""

    def set_aside(self) -> list[str]:
        """Names in quarantine."""

    def validate(self, name: str, *, checksums: bool, meter: Meter | None = None) -> Manifest:
        """Check that every file is there with its size (and its hash). Raises InvalidCheckpointError or
        UnknownFormatError.

        ``meter`` counts what has been read.
        """

    def read_manifest(self, name: str, *, patient: bool = False) -> Manifest:
        """The manifest alone. Raises InvalidCheckpointError or UnknownFormatError.

        ``patient``: the checkpoint is known to exist; wait a moment for it to be seen from here.
        """

    def read_document(self, name: str, file: FileEntry) -> bytes:
        """A small file's content, checked against its hash. Raises InvalidCheckpointError."""

    def open_shard(self, name: str, file: str) -> AbstractContextManager[ShardReader]:
        """Open a file for reading by its name in the manifest."""

    def quarantine(self, name: str) -> str:
        """Set a damaged checkpoint aside for inspection; what it is called now."""

    def remove(self, name: str) -> None:
        """Delete a checkpoint: it stops being one before its first file goes."""

    def mark_latest(self, name: str, version: Version) -> None:
        """Leave the hint which checkpoint is the newest."""

    def mark_best(self, name: str, version: Version) -> None:
        """Remember which checkpoint is the best."""

    def latest(self) -> str | None:
        """The hint's name, whether or not that checkpoint exists."""

    def best(self) -> str | None:
        """The best checkpoint's name, whether or not it exists."""

    def locate(self, name: str) -> str:
        """Where a checkpoint is, for messages."""


class Fence(Protocol):
    """Which generation may write."""

    def check(self, generation: int) -> None:
        """Raise FencedError if a newer generation has been claimed."""


@dataclass(frozen=True)
class Store:
    """A place for one run's checkpoints."""

    attempts: Attempts
    library: Library
    fence: Fence
    faults: FaultPoints
