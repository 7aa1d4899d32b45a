"""The newest generation, kept where a restart finds it. A number is durable before it is sent to anybody."""

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Protocol


class JournalError(Exception):
    """The journal cannot be used; the text says where, what, why and the remedy."""


class GenerationStore(Protocol):
    """The place of the number.

    It is called from a thread, so that it may take its time.
    """

    def load(self) -> int:
        """The newest generation ever issued; 0 for none. Raises JournalError."""

    def advance(self, expected: int, new: int) -> bool:
        """Put ``new`` in the place of ``expected``, durably. False if another coordinator has changed it.

        Raises OSError where that is not known; the caller asks again.
        """

    def close(self) -> None:
        """Give up the claim, if there is one."""


class MemoryStore:
    """Keeps the number in memory, for a run whose generations start anew with its coordinator."""

    def __init__(self, generation: int = 0) -> None:
        self._generation = generation

    def load(self) -> int:
        """The newest number."""
        return self._generation

    def advance(self, expected: int, new: int) -> bool:
        """Compare and set."""
        if expected != self._generation:
            return False
        self._generation = new
        return True

    def close(self) -> None:
        """Nothing to give up."""


class FileStore:
    """A file beside a lock that one process can hold. The lock ends with its process, however that ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises JournalError if another process has it, or the folder cannot be written."""
        self._path = path
        self._lock_path = path.with_name(path.name + ".lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise JournalError(
                f"{self._lock_path}: cannot be opened; {error.strerror}. Choose a folder that can be written."
            ) from error
        # Not waited for: the process that holds the lock rules the run, and may do so for days.
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = (
                os.pread(self._lock, 200, 0).decode(errors="replace").strip()
                or "an unknown process"
            )
            os.close(self._lock)
            text = f"{path}: held by {holder}; one coordinator rules a run. Wait for it to end, or end it."
            raise JournalError(text) from error
        self._unsynced: int | None = None
        """The number in the file, put there by this process, if the folder may not be on disk with it."""
        # For people and for the message above: the lock itself names nobody.
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def load(self) -> int:
        """The number in the file; 0 where there is none yet."""
        try:
            text = self._path.read_text(encoding="ascii")
        except FileNotFoundError:
            return 0
        except (OSError, UnicodeDecodeError) as error:
            raise JournalError(
                f"{self._path}: cannot be read; {error}. Repair the volume, or delete the file."
            ) from error
        try:
            generation = json.loads(text)["generation"]
        except (ValueError, KeyError, TypeError):
            generation = None
        # Not taken for 0: numbers that a group still runs under would be given out a second time.
        if type(generation) is not int or generation < 0:
            text = (
                f"{self._path}: holds no generation: damaged. Delete it and pass --first-generation "
                "above all used."
            )
            raise JournalError(text)
        return generation

    def advance(self, expected: int, new: int) -> bool:
        """Replace the file if it still says ``expected``; on disk when this returns."""
        known = self.load()
        # Asked again after the last step had failed: this process itself has put the number there.
        if known == new == self._unsynced:
            self._sync_folder()
            return True
        if known != expected:
            return False

        # On the disk under another name first: after a crash the file has the old number or the new one.
        temporary = self._path.with_name(self._path.name + ".tmp")
        file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            os.write(file, json.dumps({"generation": new}).encode() + b"\n")
            os.fsync(file)
        finally:
            os.close(file)

        # The file has its new name on the disk only once its folder is there, too.
        os.replace(temporary, self._path)
        self._unsynced = new
        self._sync_folder()
        return True

    def _sync_folder(self) -> None:
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._unsynced = None

    def close(self) -> None:
        """Give the lock to the next coordinator."""
        os.close(self._lock)
