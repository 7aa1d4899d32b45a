"""Keeps the files of a checkpoint in memory. Each file is read once, hashed and then loaded from memory."""

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from evergrad_trainer.base.bytes_moved import MOVED
from evergrad_trainer.base.durable import naming
from evergrad_trainer.base.machine import usable_memory_bytes
from evergrad_trainer.checkpoint import files

BLOCK_BYTES = 16 * 2**20
"""Bytes per read call. The blocks are large because each call reacquires the GIL, which the thread that
imports packages may hold for milliseconds."""
READING_THREADS = 4
"""Number of files that are read ahead in parallel. A single reader may not use a network volume fully."""
SHARE_OF_MEMORY = 0.25
"""Largest share of a process's usable memory for files in memory. The state, its gradients and the copy for
saving need the rest."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class HeldFile:
    """The bytes of one file and their hash as 32 hex digits."""

    data: memoryview
    hash: str


def room_for_files() -> int:
    """Return the bytes that files in memory may use now; 0 if the usable memory cannot be determined."""
    return int(SHARE_OF_MEMORY * (usable_memory_bytes() or 0))


class HeldFiles:
    """Whole files in memory, by their paths. Several threads may use one object.

    A load from this object returns the hashed bytes, even if a file has changed since.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        """``limit_bytes`` is the maximum memory for all files together."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._held: dict[Path, HeldFile] = {}
        self._trusted: set[Path] = set()
        self._threads: list[threading.Thread] = []
        self._ahead = files.Meter()

    def begin(self, paths: Iterable[Path]) -> None:
        """Start to read ``paths`` in separate threads. Call ``wait`` to wait for them."""
        waiting = list(paths)

        def read_ahead() -> None:
            # Errors of the volume are ignored here, because the restore meets and reports them.
            with contextlib.suppress(OSError, IndexError):
                while True:
                    self._hash(waiting.pop(0), self._ahead)

        for _ in range(min(READING_THREADS, len(waiting))):
            # A daemon thread, so that a volume that hangs cannot prevent the process from exiting.
            thread = threading.Thread(target=read_ahead, name="read-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, meter: files.Meter | None = None) -> None:
        """Wait until the started reads have ended. While they make progress, ``meter`` is incremented."""
        known = 0
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
                if meter is not None and self._ahead.units != known:
                    known = self._ahead.units
                    meter.add()
        self._threads.clear()

    def has(self, path: Path) -> bool:
        """Return whether a file is in memory, whether or not its hash is correct."""
        return path in self._held

    def matches(
        self, path: Path, expected: str, *, meter: files.Meter | None = None
    ) -> bool:
        """Return whether the file's bytes have the hash ``expected``.

        If they do, the bytes are kept in memory if there is room. A file that is already in memory is read
        again only if its hash differs. Raises OSError.
        """
        was_here = self.has(path)
        if self._hash(path, meter) != expected:
            # Bytes that were read ahead may be older than the manifest, so read the file again.
            self.drop(path)
            if not was_here or self._hash(path, meter) != expected:
                self.drop(path)
                return False
        self._trusted.add(path)
        return True

    def find(self, path: Path) -> memoryview | None:
        """Return the bytes of a file that is in memory and has matched its hash; None for any other file."""
        held = self._held.get(path)
        return None if held is None or path not in self._trusted else held.data

    def drop(self, path: Path) -> None:
        """Drop a file from memory, so that it is not loaded from there."""
        with self._lock:
            self._trusted.discard(path)
            self._held.pop(path, None)
            self._sizes.pop(path, None)

    def keep_only(self, folder: Path) -> None:
        """Drop the files of all other folders, because the memory is for one checkpoint at a time."""
        for path in list(self._held):
            if path.parent != folder:
                self.drop(path)

    def release(self) -> None:
        """Release all memory."""
        for path in list(self._held):
            self.drop(path)

    def _hash(self, path: Path, meter: files.Meter | None) -> str:
        """Return the hash of a whole file, which is read into memory if there is room."""
        held = self._held.get(path)
        if held is not None:
            return held.hash
        size = path.stat().st_size
        # Reserve the memory before the file is read, because several threads read in parallel.
        with self._lock:
            has_room = sum(self._sizes.values()) + size <= self._limit_bytes
            if has_room:
                self._sizes[path] = size
        memory: memoryview | None = None
        try:
            # Direct I/O requires whole pages. Use small pages, because huge pages are expensive in fragmented
            # memory. The mapping is private, because shared memory counts towards a smaller limit. If there
            # is no memory, the file is only hashed.
            if has_room:
                pages = -(-size // mmap.PAGESIZE) or 1
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
                with contextlib.suppress(OSError):
                    memory = memoryview(mmap.mmap(-1, pages * mmap.PAGESIZE, flags=flags))
            if memory is None:
                return files.hash_file(path, meter=meter)
            held = self._held[path] = _read(path, memory, size, meter)
        finally:
            if path not in self._held:
                self.drop(path)
        return held.hash


def _read(path: Path, memory: memoryview, size: int, meter: files.Meter | None) -> HeldFile:
    """Read and hash ``size`` bytes, with direct I/O if the file system supports it.

    Pages in the page cache would be a second copy and as expensive to allocate as ``memory``.
    """
    digest, offset = xxhash.xxh3_128(), 0
    descriptor = os.open(path, os.O_RDONLY)
    try:
        is_direct = files.set_direct(descriptor, True)
        while offset < size:
            try:
                with naming(path):
                    count = os.preadv(
                        descriptor, [memory[offset : offset + BLOCK_BYTES]], offset
                    )
            except OSError as error:
                # Some file systems accept the flag but reject the read. Direct reads must be page-aligned.
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                is_direct = files.set_direct(descriptor, False)
                continue
            if count == 0:
                break
            # Hash the block while it is in the CPU cache and other threads wait for the disk.
            digest.update(memory[offset : offset + count])
            offset += count
            MOVED.note(count)
            if meter is not None:
                meter.add()
    finally:
        os.close(descriptor)
    return HeldFile(memory[:offset], digest.hexdigest())
