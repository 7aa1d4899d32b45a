"""Durable writing, hashing and removal of files: the only place that calls write, fsync and rename."""

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

HASH_ALGORITHM = "xxh3-128"
"""About 12 GB/s on one core where sha256 does 2 and crc32 does 3: free beside any disk."""
BLOCK_BYTES = 8 * 2**20
"""Bytes written by one call. Large, because each call lets go of the interpreter lock and takes it again."""
READ_BYTES = 2**20
"""Bytes read for hashing by one call, into a buffer that each hashing thread has."""


def hash_bytes(data: bytes | memoryview) -> str:
    """Hash of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass
class Meter:
    """Counts what is read, for somebody who waits to see whether it goes on.

    Threads may add to it together.
    """

    units: int = 0

    def add(self) -> None:
        """Count one block, or one checkpoint. A lost count does no harm: the next one shows the progress."""
        self.units += 1


def hash_file(path: Path, *, meter: Meter | None = None) -> str:
    """Hash of a whole file as 32 hex digits, read in blocks into one buffer."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            if meter is not None:
                meter.add()
    return digest.hexdigest()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an OSError of a descriptor say which file it was."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte of ``data``; a full disk may take a part of it first and refuse the rest."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_new(path: Path, data: bytes) -> None:
    """Create ``path``, which must not exist, with ``data`` on the disk when this returns (its directory entry
    is not yet)."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with naming(path):
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(path: Path, data: bytes) -> None:
    """Give ``path`` the content ``data``: readers see the old or the new, also after a power cut."""
    temporary = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    write_new(temporary, data)
    os.rename(temporary, path)
    fsync_directory(path.parent)


def fsync_directory(path: Path) -> None:
    """Make names created, renamed or removed in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename_to_free_name(source: Path, target: Path) -> bool:
    """Rename a directory to a name that must be free; False, and nothing changed, if it is taken."""
    if os.path.lexists(target):
        return False
    try:
        os.rename(source, target)
    except OSError as error:
        # A directory with content refuses to be renamed over; that is the fence against a second writer.
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            return False
        raise
    return True


def remove_tree(path: Path) -> bool:
    """Delete a directory as far as it goes; whether it is gone.

    On a network volume a file that someone still has open leaves ESTALE or a directory that is "not empty":
    the rest is deleted at the next start.
    """
    shutil.rmtree(path, ignore_errors=True)
    return not os.path.lexists(path)
