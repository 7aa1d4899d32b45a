"""Reads windows of S + 1 tokens from prepared token files, by position and with bounded memory."""

import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.volume import retry, volume_error
from evergrad_trainer.data.prepared import WIDTH, Shard, TokenSequence

_OPEN_FILES: Final = 128
_STALE_SECONDS: Final = 0.2
"""Pause before a file that seems too short is checked again."""


def count_windows(tokens: int, sequence_length: int) -> int:
    """Return the number of windows of S labels that contain every token except the first exactly once.

    For example, 9 tokens with S = 4 give 2 windows.
    """
    return max(0, -(-(tokens - 1) // sequence_length))


@dataclass(frozen=True)
class Windows:
    """Windows of tokens.

    ``tokens``: int64 [n, S + 1], padded with the end id. ``lengths``: int64 [n], the number of tokens of each
    row without padding.
    """

    tokens: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]


class TokenReader:
    """Reads windows of a token sequence.

    Window i consists of the tokens [i·S, i·S + S + 1) of the concatenated shards; the last window may be
    shorter. The reader uses ``pread``, not a memory map: resident memory stays bounded, and a truncated file
    raises an error with its name instead of SIGBUS (docs/decisions/0003-token-files.md). It is safe to use
    from several threads.
    """

    def __init__(
        self, sequence: TokenSequence, *, sequence_length: int, end_of_document: int
    ) -> None:
        self.num_tokens = sequence.tokens
        self.num_windows = count_windows(self.num_tokens, sequence_length)
        self._shards = sequence.shards
        self._starts = [0, *accumulate(shard.tokens for shard in sequence.shards)]
        self._dtype = np.dtype(sequence.dtype).newbyteorder("<")
        self._width = WIDTH[sequence.dtype]
        self._length = sequence_length
        self._end = end_of_document
        self._files = _Files()

    def read(self, windows: Sequence[int]) -> Windows:
        """Read the windows with these numbers, in this order.

        Raises IndexError if a window does not exist, and DataError if a file is missing or truncated.
        """
        # Fill the rows with the end id first, because the last window may be shorter than a row.
        rows = np.full((len(windows), self._length + 1), self._end, dtype=self._dtype)
        lengths = np.empty(len(windows), dtype=np.int64)
        for row, window in enumerate(windows):
            if not 0 <= window < self.num_windows:
                raise IndexError(f"window {window} of {self.num_windows}")
            begin = window * self._length
            count = min(self._length + 1, self.num_tokens - begin)
            lengths[row] = count
            self._fill(memoryview(rows[row]).cast("B"), begin, count)
        return Windows(rows.astype(np.int64), lengths)

    def read_span(self, begin: int, count: int) -> npt.NDArray[np.int64]:
        """Read ``count`` tokens, starting with token ``begin``, as int64 [count].

        Raises IndexError if the span is out of range, and DataError if a file is missing or truncated.
        """
        if begin < 0 or begin + count > self.num_tokens:
            raise IndexError(f"tokens {begin} to {begin + count} of {self.num_tokens}")
        found = np.empty(count, dtype=self._dtype)
        self._fill(found.data.cast("B"), begin, count)
        return found.astype(np.int64)

    def _fill(self, target: memoryview, begin: int, count: int) -> None:
        """Fill ``target`` with ``count`` tokens, starting with token ``begin``."""
        # The tokens may span several shards.
        index = bisect_right(self._starts, begin) - 1
        while count:
            shard = self._shards[index]
            offset = begin - self._starts[index]
            here = min(count, shard.tokens - offset)
            size = here * self._width
            place = (shard.start + offset) * self._width
            self._files.read(shard.path, target[:size], place)
            target = target[size:]
            begin += here
            count -= here
            index += 1

    def place(self, window: int) -> tuple[Shard, int, int]:
        """Return the shard in which a window starts, and the start and end of the window in this shard.

        The end is at most the end of the shard.
        """
        begin = window * self._length
        index = bisect_right(self._starts, begin) - 1
        shard = self._shards[index]
        first = begin - self._starts[index]
        end = min(first + self._length + 1, shard.tokens)
        return shard, first, end

    def close(self) -> None:
        """Close the files; the next read opens them again."""
        self._files.close()


class _Files:
    """A cache of open files by path. The least recently used file is closed first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[Path, int] = OrderedDict()
        # Close all descriptors with the object, also if its owner does not call close, as in a test.
        self._closer = weakref.finalize(self, _close_all, self._open)

    def read(self, path: Path, target: memoryview, offset: int) -> None:
        """Fill ``target`` with the bytes from ``offset``.

        Raises DataError if the file is missing, or if it is too short even after it is opened again. Raises
        VolumeError if the volume has errors that persist after retries.
        """
        shortest: int | None = None
        # The loop ends, because a file with the same insufficient size after reopening is damaged.
        while True:
            try:
                size = retry(
                    lambda: self._fill(path, target, offset),
                    where=path,
                    what="cannot be read",
                )
            except FileNotFoundError as error:
                what = f"cannot be read ({error.strerror})"
                raise DataError(unreadable(path, what)) from error
            except OSError as error:
                raise volume_error(error, path, "cannot be read") from error
            if size is None:
                return
            if size == shortest:
                end = offset + len(target)
                what = f"ends at byte {size}; a sample needs those up to {end}"
                raise DataError(unreadable(path, what))
            # A client of a network volume may cache an old size until the file is opened again.
            shortest = size
            self._drop(path)
            time.sleep(_STALE_SECONDS)

    def _fill(self, path: Path, target: memoryview, offset: int) -> int | None:
        """Read one time. Returns None if ``target`` is full, else the size of the file, which is too small.

        An OSError closes the file.
        """
        count = 0
        try:
            while count < len(target):
                # The lock prevents another thread from closing the file between its lookup and its use.
                with self._lock:
                    descriptor = self._open.get(path)
                    if descriptor is None:
                        # Limit the open files: a process may typically open about 1,000 files, and a source
                        # may have thousands of shards.
                        if len(self._open) >= _OPEN_FILES:
                            _, oldest = self._open.popitem(last=False)
                            os.close(oldest)
                        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        self._open[path] = descriptor
                    self._open.move_to_end(path)
                    more = os.preadv(descriptor, [target[count:]], offset + count)
                    if more == 0:
                        return os.fstat(descriptor).st_size
                count += more
        except OSError:
            # Close the file, because a stale handle stays stale. The next attempt opens the file again.
            self._drop(path)
            raise
        return None

    def _drop(self, path: Path) -> None:
        with self._lock, suppress(OSError):
            descriptor = self._open.pop(path, None)
            if descriptor is not None:
                os.close(descriptor)

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            _close_all(self._open)


def _close_all(files: "OrderedDict[Path, int]") -> None:
    while files:
        _, descriptor = files.popitem()
        os.close(descriptor)


def unreadable(path: Path, what: str) -> Problem:
    """Return the problem of a file that was removed or truncated after it was prepared."""
    remedy = (
        "If it is a source file, restore it; if it is prepared data, delete the directory "
        f"{path.parent} and prepare again"
    )
    return Problem(
        str(path), what, "it was removed or cut short after it was prepared", remedy
    )


def read_documents(path: Path) -> npt.NDArray[Any]:
    """Read the index of a shard's documents: int64 [n, 2], the first token and the line of each document.

    Raises DataError if the file cannot be read.
    """
    try:
        return np.fromfile(path, dtype="<i8").reshape(-1, 2)
    except (OSError, ValueError) as error:
        raise DataError(unreadable(path, f"cannot be read ({error})")) from error
