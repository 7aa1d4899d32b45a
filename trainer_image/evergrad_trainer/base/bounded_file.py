"""A log file of bounded size. It keeps the beginning and the newest end; a line reports the dropped bytes.

======================  ==============================================  =========================
file                    content                                         maximum size
======================  ==============================================  =========================
``worker.out``          the beginning                                   HEAD_BYTES
``worker.out.older``    the newest full part before the end             PART_BYTES
``worker.out.newest``   the end                                         PART_BYTES
======================  ==============================================  =========================

Each file may exceed its maximum by one line. A restarted process appends to the file that the last process
wrote to.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Final

HEAD_BYTES: Final = 16 * 2**20
"""Size of the beginning, about 200,000 lines. It contains the versions, the settings and the first errors."""
PART_BYTES: Final = 8 * 2**20
"""Size of each of the two parts of the end. A worker uses at most 32 MiB of the volume in total. Without a
bound, a script that prints 2 MB/s would fill a volume of 20 GiB in three hours."""
_LONGEST_LINE: Final = 2**16
"""Bytes after which a line without an end is split, because such a line could exceed any bound."""


class BoundedFile:
    """Appends bytes to the files in the table above.

    Once the file is open, no method raises an error, because a failure to log must not end a run.
    """

    def __init__(
        self, path: Path, *, head_bytes: int = HEAD_BYTES, part_bytes: int = PART_BYTES
    ) -> None:
        """Open the file that the last process wrote to. Raises OSError."""
        self._path = path
        self._newest = path.with_name(f"{path.name}.newest")
        self._older = path.with_name(f"{path.name}.older")
        self._head_bytes, self._part_bytes = head_bytes, part_bytes
        self._ends_line = True
        self._dropped = 0
        """Bytes between the beginning and the end that this process has dropped."""
        self._lost = 0
        """Bytes that could not be written to the volume and are not reported in the log yet."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_head = not self._newest.exists()
        self._file: io.FileIO | None = None
        self._open(path if self._is_head else self._newest)

    def write(self, data: bytes) -> None:
        """Append ``data``. If the volume rejects it, a later line reports the number of missing bytes."""
        try:
            if self._is_full():
                self._rotate()
            if self._lost:
                note = f"[evergrad] {self._lost} bytes are missing here because the volume refused them\n"
                self._append(note.encode())
                self._lost = 0
            self._append(data)
            self._ends_line = data.endswith(b"\n")
        except OSError:
            self._lost += len(data)

    def close(self) -> None:
        """Close the file and ignore errors, which some volumes report only on close."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _open(self, path: Path) -> None:
        self.close()
        self._file = io.FileIO(path, "a")
        self._size = os.fstat(self._file.fileno()).st_size

    def _append(self, data: bytes) -> None:
        if self._file is None:
            self._open(self._path if self._is_head else self._newest)
        file, rest = self._file, memoryview(data)
        while file is not None and rest:
            written = file.write(rest) or 0
            self._size += written
            rest = rest[written:]

    def _is_full(self) -> bool:
        bound = self._head_bytes if self._is_head else self._part_bytes
        # Rotate at the end of a line, so that no line is split unless it is too long.
        return self._size >= (bound if self._ends_line else bound + _LONGEST_LINE)

    def _rotate(self) -> None:
        """Start a new file for the newest output, and drop the older part if there is one. Raises OSError."""
        if self._is_head:
            note = f"[evergrad] the output continues in {self._older.name} and {self._newest.name}\n"
        else:
            # The rename below replaces the older part. No other statement drops data.
            with contextlib.suppress(FileNotFoundError):
                self._dropped += self._older.stat().st_size
            self._newest.replace(self._older)
            note = (
                f"[evergrad] this continues {self._older.name}; at least {self._dropped} bytes between "
                f"{self._path.name} and {self._older.name} were dropped\n"
            )
        if self._is_head:
            self._append(note.encode())
        self._is_head = False
        self._open(self._newest)
        if self._dropped:
            self._append(note.encode())
        self._ends_line = True
