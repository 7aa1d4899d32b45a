"""Files of a checkpoint in memory: each is read once, hashed as it is read, and loaded from what was
hashed."""

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
"""Bytes of one read. Each takes the interpreter lock again, which the thread that imports holds for
milliseconds."""
READING_THREADS = 4
"""Files that are read ahead at the same time: one alone may leave a network volume idle."""
SHARE_OF_MEMORY = 0.25
"""Largest share, of the memory a process may use, that files in memory may take: the state itself, its
gradients and the copy for saving need the rest."""
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class HeldFile:
    """The bytes of one file as they were read, and their hash as 32 hex digits."""

    data: memoryview
    hash: str


def room_for_files() -> int:
    """Bytes that files in memory may take here and now; none where that cannot be known."""
    return int(SHARE_OF_MEMORY * (usable_memory_bytes() or 0))


class HeldFiles:
    """Files that were read whole, by their paths. Several threads may use one.

    A load from here gets the bytes that were hashed, even where a file has changed since.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        """``limit_bytes``: most memory that all files together may take."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._sizes: dict[Path, int] = {}
        self._held: dict[Path, HeldFile] = {}
        self._trusted: set[Path] = set()
        self._threads: list[threading.Thread] = []
        self._ahead = files.Meter()

    def begin(self, paths: Iterable[Path]) -> None:
        """Begin to read ``paths`` in threads of their own; ``wait`` waits for them."""
        waiting = list(paths)

        def read_ahead() -> None:
            # Trouble of the volume is met again, and reported, by the restore itself.
            with contextlib.suppress(OSError, IndexError):
                while True:
                    self._hash(waiting.pop(0), self._ahead)

        for _ in range(min(READING_THREADS, len(waiting))):
            # A daemon: a volume that hangs must not keep the process from ending.
            thread = threading.Thread(target=read_ahead, name="read-ahead", daemon=True)
            self._threads.append(thread)
            thread.start()

    def wait(self, meter: files.Meter | None = None) -> None:
        """Wait until what was begun is read; ``meter`` counts while it continues."""
        known = 0
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_LOOK_SECONDS)
                if meter is not None and self._ahead.units != known:
                    known = self._ahead.units
                    meter.add()
        self._threads.clear()

    def has(self, path: Path) -> bool:
        """Whether a file was read, be it what it should be or not."""
        return path in self._held

    def matches(
        self, path: Path, expected: str, *, meter: files.Meter | None = None
    ) -> bool:
        """Whether the file's bytes have the hash ``expected``. If so they stay here, where there is room.

        A file that is here already is not read again. Raises OSError.
        """
        was_here = self.has(path)
        if self._hash(path, meter) != expected:
            # Bytes that were read ahead may be older than the manifest: the file as it is now decides.
            self.drop(path)
            if not was_here or self._hash(path, meter) != expected:
                self.drop(path)
                return False
        self._trusted.add(path)
        return True

    def find(self, path: Path) -> memoryview | None:
        """All bytes of a file that is here and matched its hash; None for any other."""
        held = self._held.get(path)
        return None if held is None or path not in self._trusted else held.data

    def drop(self, path: Path) -> None:
        """Forget a file: nothing may be loaded from what was read."""
        with self._lock:
            self._trusted.discard(path)
            self._held.pop(path, None)
            self._sizes.pop(path, None)

    def keep_only(self, folder: Path) -> None:
        """Forget the files of all other folders: the memory is for one checkpoint at a time."""
        for path in list(self._held):
            if path.parent != folder:
                self.drop(path)

    def release(self) -> None:
        """Give all memory back."""
        for path in list(self._held):
            self.drop(path)

    def _hash(self, path: Path, meter: files.Meter | None) -> str:
        """Hash of a whole file, read into memory if there is room for it."""
        held = self._held.get(path)
        if held is not None:
            return held.hash
        size = path.stat().st_size
        # Room is taken before the file is read: several threads read at the same time.
        with self._lock:
            has_room = sum(self._sizes.values()) + size <= self._limit_bytes
            if has_room:
                self._sizes[path] = size
        memory: memoryview | None = None
        try:
            # Direct reading wants whole pages. Small ones: huge ones are dearer where memory is fragmented.
            # Private, because shared memory counts against another, smaller limit. That there is none says
            # nothing about the file.
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
    """Read ``size`` bytes past the page cache where the file system lets it: its pages would be a second
    copy, and as dear to get as these."""
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
                # Some file systems take the flag and refuse the read; none continues within a page.
                if error.errno != errno.EINVAL or not is_direct:
                    raise
                is_direct = files.set_direct(descriptor, False)
                continue
            if count == 0:
                break
            # Hashed while it is in the processor's cache, and while other threads wait for the disk.
            digest.update(memory[offset : offset + count])
            offset += count
            MOVED.note(count)
            if meter is not None:
                meter.add()
    finally:
        os.close(descriptor)
    return HeldFile(memory[:offset], digest.hexdigest())
