"""One rank's file of a save: tensors gathered into large blocks, each hashed and written past the page cache,
the end synced."""

import contextlib
import errno
import mmap
import os
from pathlib import Path

import xxhash

from evergrad_trainer.base.durable import naming, write_all
from evergrad_trainer.checkpoint import files
from evergrad_trainer.checkpoint.faults import BEFORE_FSYNC, MID_SHARD, FaultPoints
from evergrad_trainer.checkpoint.layout import ALIGNMENT
from evergrad_trainer.checkpoint.manifest import FileEntry


class ShardFile:
    """Writes whole blocks directly from one aligned buffer to the disk (O_DIRECT), where the file system lets
    it.

    Nobody reads a checkpoint soon, and a copy of it in the page cache costs training: allocating and filling
    those pages took 0.3 to 2.3 s of a core for 600 MB, all of this takes 0.2 s; and they push out what is
    read, such as the data.
    """

    def __init__(
        self,
        descriptor: int,
        path: Path,
        *,
        rank: int,
        faults: FaultPoints,
        block_bytes: int = files.BLOCK_BYTES,
    ) -> None:
        """``descriptor`` is ``path``, newly created for writing; this object closes it.

        ``block_bytes``: whole memory pages.
        """
        self._descriptor = descriptor
        self._path = path
        self._rank = rank
        self._faults = faults
        self._hash = xxhash.xxh3_128()
        self._memory = mmap.mmap(
            -1, block_bytes
        )  # begins at a page, as direct writing wants
        self._block = memoryview(self._memory)
        self._filled = 0
        self._written = 0
        self._is_direct = files.set_direct(descriptor, True)

    def append(self, data: memoryview) -> int:
        """Add ``data`` at the next aligned offset; that offset."""
        if self._filled or self._written:
            self._faults.reached(MID_SHARD, self._rank)
        # Aligned for every dtype, and for a later memory map.
        offset = self._written + self._filled
        padding = -offset % ALIGNMENT
        if padding:
            self._gather(memoryview(bytes(padding)))
        self._gather(data)
        return offset + padding

    def finish(self) -> FileEntry:
        """Write the rest and make the file durable. A full disk may say so only here."""
        with naming(self._path):
            self._is_direct = files.set_direct(
                self._descriptor, False
            )  # the rest is no whole block
            self._write_block()
            self._faults.reached(BEFORE_FSYNC, self._rank)
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)  # a network volume may report a quota only here
        return FileEntry(
            name=self._path.name, bytes=self._written, hash=self._hash.hexdigest()
        )

    def abandon(self) -> None:
        """Give memory and descriptor back, without fsync if it is not finished. Never raises."""
        # An error on its way may still hold a part of the memory.
        with contextlib.suppress(BufferError):
            self._block.release()
            self._memory.close()
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _gather(self, data: memoryview) -> None:
        while data:
            count = min(len(data), len(self._block) - self._filled)
            self._block[self._filled : self._filled + count] = data[:count]
            self._filled += count
            data = data[count:]
            if self._filled == len(self._block):
                with naming(self._path):
                    self._write_block()

    def _write_block(self) -> None:
        # Hashed while it is in the processor's cache.
        block = self._block[: self._filled]
        self._hash.update(block)
        try:
            write_all(self._descriptor, block)
        except OSError as error:
            # Some file systems take the flag and refuse the write.
            is_untouched = os.lseek(self._descriptor, 0, os.SEEK_CUR) == self._written
            if error.errno != errno.EINVAL or not self._is_direct or not is_untouched:
                raise
            self._is_direct = files.set_direct(self._descriptor, False)
            write_all(self._descriptor, block)
        self._written += self._filled
        self._filled = 0
