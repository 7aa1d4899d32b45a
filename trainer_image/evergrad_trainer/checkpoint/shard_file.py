"""Writes one rank's file of a save: tensors in large blocks, hashed, written with direct I/O, then synced."""

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
    """Writes whole blocks from one aligned buffer to the disk, with O_DIRECT if the file system supports it.

    A checkpoint is rarely read after it is written, so a copy in the page cache only slows training down. For
    600 MB, allocating and filling these pages took 0.3 to 2.3 s of one core; the direct write takes 0.2 s.
    The pages would also evict cached files that are read, such as the training data.
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
        """``descriptor`` is the newly created file ``path``, open for writing. This object closes it.

        ``block_bytes`` must be a multiple of the page size.
        """
        self._descriptor = descriptor
        self._path = path
        self._rank = rank
        self._faults = faults
        self._hash = xxhash.xxh3_128()
        self._memory = mmap.mmap(-1, block_bytes)  # page-aligned, which direct I/O requires
        self._block = memoryview(self._memory)
        self._filled = 0
        self._written = 0
        self._is_direct = files.set_direct(descriptor, True)

    def append(self, data: memoryview) -> int:
        """Append ``data`` at the next aligned offset, and return the offset in bytes."""
        if self._filled or self._written:
            self._faults.reached(MID_SHARD, self._rank)
        # Aligned for every dtype and for memory mapping.
        offset = self._written + self._filled
        padding = -offset % ALIGNMENT
        if padding:
            self._gather(memoryview(bytes(padding)))
        self._gather(data)
        return offset + padding

    def finish(self) -> FileEntry:
        """Write the rest, make the file durable, and return its entry for the manifest.

        Raises OSError. Some volumes report a full disk only here.
        """
        with naming(self._path):
            self._is_direct = files.set_direct(
                self._descriptor, False
            )  # the rest is not a whole block
            self._write_block()
            self._faults.reached(BEFORE_FSYNC, self._rank)
            os.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, -1
            os.close(descriptor)  # a network volume may report an exceeded quota only here
        return FileEntry(
            name=self._path.name, bytes=self._written, hash=self._hash.hexdigest()
        )

    def abandon(self) -> None:
        """Release the memory and the descriptor. Closes an unfinished file without fsync. Never raises."""
        # The traceback of an exception may still refer to a part of the memory.
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
        # Hash the block now, while it is in the CPU cache.
        block = self._block[: self._filled]
        self._hash.update(block)
        try:
            write_all(self._descriptor, block)
        except OSError as error:
            # Some file systems accept the flag but reject the write.
            is_untouched = os.lseek(self._descriptor, 0, os.SEEK_CUR) == self._written
            if error.errno != errno.EINVAL or not self._is_direct or not is_untouched:
                raise
            self._is_direct = files.set_direct(self._descriptor, False)
            write_all(self._descriptor, block)
        self._written += self._filled
        self._filled = 0
