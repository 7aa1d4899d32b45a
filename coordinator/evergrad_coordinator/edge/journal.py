"""Stores the newest generation so that a restart finds it. A number is durable before any node receives
it."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Protocol


class JournalError(Exception):
    """The journal cannot be used. The text contains the place, the problem, the reason and the remedy."""


class GenerationStore(Protocol):
    """Storage of the newest generation.

    The coordinator calls it from a thread, so calls may block.
    """

    def load(self) -> int:
        """Return the newest generation ever issued; 0 for none. Raises JournalError if it cannot be read."""

    def advance(self, expected: int, new: int) -> bool:
        """Replace ``expected`` by ``new``, durably. Return False if another coordinator has changed the
        number.

        Raises OSError if the result is unknown; the caller then retries. For example, ``advance(6, 7)``
        returns False if the stored number is 8.
        """

    def close(self) -> None:
        """Give up the claim, if there is one."""


class MemoryStore:
    """Keeps the number in memory, for a run whose generations restart with its coordinator."""

    def __init__(self, generation: int = 0) -> None:
        self._generation = generation

    def load(self) -> int:
        """Return the newest number."""
        return self._generation

    def advance(self, expected: int, new: int) -> bool:
        """Replace the number if it is ``expected``; return whether it was."""
        if expected != self._generation:
            return False
        self._generation = new
        return True

    def close(self) -> None:
        """Do nothing, because there is no claim."""


_RECORD_BYTES = 128
"""Length of the file in bytes. It never changes, so each write brings one sector to the disk."""


class FileStore:
    """A file with a lock that one process can hold. The lock ends when its process ends.

    A process creates the file again for its first number and overwrites it in place for later numbers.
    In-place writes are faster, and a change of the group waits for each write.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises JournalError if another process has it, or the folder cannot be written."""
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(
                self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644
            )
        except OSError as error:
            raise JournalError(
                f"{self._lock_path}: cannot be opened; {error.strerror}. Choose a folder that can be written."
            ) from error
        # Do not wait: the process that holds the lock controls the run, possibly for days.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (
                os.pread(self._lock, 200, 0).decode(errors="replace").strip()
                or "an unknown process"
            )
            os.close(self._lock)
            text = (
                f"{path}: held by {holder}; only one coordinator may control a run. Wait until that "
                "process ends, or stop it."
            )
            raise JournalError(text) from error
        self._file: int | None = None
        """The file, once this process has made it and it is on disk under its name."""
        self._unsynced: int | None = None
        """The number in the file, put there by this process, while it may not be on disk."""
        # For people and for the message above: the lock itself does not name its holder.
        os.ftruncate(self._lock, 0)
        os.pwrite(
            self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )

    def load(self) -> int:
        """Return the number in the file, or 0. Raises JournalError if it is unreadable."""
        try:
            text = self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise JournalError(
                f"{self._path}: cannot be read; {error}. Repair the volume, or delete the file."
            ) from error
        try:
            record = json.loads(text)
            generation = record["generation"]
            # The number is stored twice, so that a torn write, with digits of two numbers, is not read as
            # a third number.
            is_whole = generation == record.get("again", generation)
        except (ValueError, KeyError, TypeError, AttributeError):
            generation, is_whole = None, False
        # Do not read this as 0: numbers that a group still uses would be issued a second time.
        if type(generation) is not int or generation < 0 or not is_whole:
            text = (
                f"{self._path}: contains no generation; it is damaged. Delete it and pass --first-generation "
                "above all used."
            )
            raise JournalError(text)
        return generation

    def advance(self, expected: int, new: int) -> bool:
        """Replace the number if it is still ``expected``. It is on disk when this returns True."""
        # This is a retry after the last step had failed: this process itself has written the number.
        known = self.load()
        if known != expected and not known == new == self._unsynced:
            return False

        record = (
            json.dumps({"generation": new, "again": new}).encode().ljust(_RECORD_BYTES - 1)
        )
        file = self._file
        if (
            file is not None
            and known > 0
            and os.path.samestat(os.fstat(file), self._path.stat())
        ):
            # If neither length nor name changes, a sync takes one write. Otherwise it takes two commits of
            # the file system's journal, which may wait for the data of a recently written checkpoint.
            self._unsynced = new
            os.pwrite(file, record + b"\n", 0)
            # Not every system has fdatasync.
            (os.fdatasync if hasattr(os, "fdatasync") else os.fsync)(file)
        else:
            self._make(new, record + b"\n")
        self._unsynced = None
        return True

    def _make(self, new: int, record: bytes) -> None:
        """Create or recreate the file with its first record."""
        self._forget_file()
        # Write under another name first: after a crash the file has the old number or the new number.
        temporary = self._path.with_name(self._path.name + ".tmp")
        file = os.open(
            temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644
        )
        try:
            os.write(file, record)
            os.fsync(file)

            # The new name is on the disk only after the folder is synced.
            os.replace(temporary, self._path)
            self._unsynced = new
            folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            os.close(file)
            raise
        self._file = file

    def _forget_file(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def close(self) -> None:
        """Give the lock to the next coordinator."""
        self._forget_file()
        os.close(self._lock)
