"""Hashing, renaming and removal of a checkpoint's files."""

import errno
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from evergrad_trainer.base.bytes_moved import MOVED

HASH_ALGORITHM = "xxh3-128"
"""About 12 GB/s on one core where sha256 does 2 and crc32 does 3: free beside any disk."""
BLOCK_BYTES = 8 * 2**20
"""Bytes written by one call. Large, because each call lets go of the interpreter lock and takes it again."""
READ_BYTES = 2**20
"""Bytes read for hashing by one call, into a buffer that each hashing thread has."""
_LOOK_SECONDS = 0.05
_DIRECT = getattr(os, "O_DIRECT", 0)


def hash_bytes(data: bytes | memoryview) -> str:
    """Hash of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass
class Meter:
    """Counts what is read, so that a waiting thread can see whether it continues.

    Several threads may add to it.
    """

    units: int = 0

    def add(self) -> None:
        """Count one block, or one checkpoint. A lost count does no harm: the next one shows the progress."""
        self.units += 1


def hash_file(path: Path, *, meter: Meter | None = None) -> str:
    """Hash of a whole file as 32 hex digits, read in blocks into one buffer."""
    # One buffer for the whole file: large files would otherwise cost an allocation a block.
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(READ_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            MOVED.note(count)
            if meter is not None:
                meter.add()
    return digest.hexdigest()


def open_seen(path: Path, flags: int, stale_seconds: float) -> int:
    """Open a file whose directory another node has just made; a descriptor.

    On a network volume it may take up to ``stale_seconds`` until it is seen from here.
    """
    # A client of a network volume remembers that a name did not exist; only time helps.
    deadline = time.monotonic() + stale_seconds
    while True:
        try:
            return os.open(path, flags, 0o666)
        except FileNotFoundError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_LOOK_SECONDS)


def list_entries(directory: Path) -> list[Path]:
    """List a directory; nothing if it does not exist."""
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []


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


def set_direct(descriptor: int, wanted: bool) -> bool:
    """Switch reading and writing past the page cache on or off; whether it is on now.

    A file system that has none refuses to switch it on.
    """
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~_DIRECT
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if wanted else flags)
    except OSError:
        return False
    return wanted and _DIRECT != 0
