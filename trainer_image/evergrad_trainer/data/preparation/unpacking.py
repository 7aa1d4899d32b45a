"""Reads plain files, and files compressed with gzip or zstandard, which are detected by their first bytes."""

import functools
import importlib
import io
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError

_GZIP: Final = b"\x1f\x8b"
_ZSTANDARD: Final = b"\x28\xb5\x2f\xfd"
_SKIPPABLE: Final = b"\x2a\x4d\x18"
"""Bytes 2 to 4 of a zstandard frame without content. Some writers begin a file with such a frame."""
_WINDOW_LOG: Final = 31
"""Base-2 logarithm of the largest supported window of a zstandard frame.

It is the limit of the format on 64-bit machines, which `zstd --long=31` uses. The default limit of the
library, 2**27, is too small for some public dumps.
"""
_INPUT: Final = 2**15
"""Compressed bytes that are unpacked at a time. A block of zeros grows about 40,000 times, so any file uses
at most about 1 GiB of memory."""


class _Unpacker(Protocol):
    """The common interface of the libraries: unpacks one member of a gzip file or one zstandard frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True)
class _Codec:
    """A format. ``begin`` creates an unpacker for the next member or frame. The unpacker raises ``error``."""

    name: str
    begin: Callable[[], _Unpacker]
    error: type[Exception]


def is_packed(path: Path) -> bool:
    """Whether the file is compressed. Raises OSError if it cannot be read."""
    with path.open("rb", buffering=0) as file:
        return _format_of(file.read(4)) is not None


def open_content(path: Path) -> io.RawIOBase:
    """Open the content of a file, unpacked if it is compressed, without buffering.

    In a compressed file, ``seek`` can only move forward. Raises OSError if the file cannot be read, and
    DataError if the library for its format is not installed. Reading raises DataError if the archive is
    damaged or truncated.
    """
    with path.open("rb", buffering=0) as file:
        name = _format_of(file.read(4))
    if name is None:
        return path.open("rb", buffering=0)
    codec = _GZIP_CODEC if name == "gzip" else _load_zstandard(path)
    return Unpacked(path, codec)


def _format_of(start: bytes) -> str | None:
    if start.startswith(_GZIP):
        return "gzip"
    is_skippable = start[1:] == _SKIPPABLE and start[0] >> 4 == 5
    return "zstandard" if start == _ZSTANDARD or is_skippable else None


def _load_zstandard(path: Path) -> _Codec:
    """Load the zstandard module of Python 3.14 or later, or else the package ``zstandard``.

    Raises DataError if neither is available.
    """
    library: Any
    with suppress(ImportError):
        library = importlib.import_module("compression.zstd")
        options = {library.DecompressionParameter.window_log_max: _WINDOW_LOG}
        begin = functools.partial(library.ZstdDecompressor, options=options)
        return _Codec("zstandard", begin, library.ZstdError)
    with suppress(ImportError):
        library = importlib.import_module("zstandard")
        decompressor = library.ZstdDecompressor(max_window_size=2**_WINDOW_LOG)
        return _Codec("zstandard", decompressor.decompressobj, library.ZstdError)
    what = "is compressed with zstandard, which cannot be read here"
    why = "the package zstandard is not installed"
    remedy = "Run `pip install zstandard`, or compress the file with gzip"
    raise DataError(Problem(str(path), what, why, remedy))


_GZIP_CODEC: Final = _Codec(
    "gzip", lambda: zlib.decompressobj(wbits=16 + zlib.MAX_WBITS), zlib.error
)


class Unpacked(io.RawIOBase):
    """The content of a compressed file: the concatenated contents of its members or frames."""

    def __init__(self, path: Path, codec: _Codec) -> None:
        self._path = path
        self._codec = codec
        self._unpacker = codec.begin()
        self._file = path.open("rb", buffering=0)
        self._waiting = memoryview(b"")
        self._position = 0
        self._is_at_end = False
        self.packed_bytes = 0
        """Number of compressed bytes that were read so far."""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move forward to ``offset``. The bytes in between are unpacked and discarded."""
        if whence != 0 or offset < self._position:
            raise io.UnsupportedOperation("a compressed file is read from its beginning")
        while self._position < offset and self._fill():
            count = min(offset - self._position, len(self._waiting))
            self._waiting = self._waiting[count:]
            self._position += count
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any, /) -> int:
        view = memoryview(target).cast("B")
        if not len(view) or not self._fill():
            return 0
        count = min(len(view), len(self._waiting))
        view[:count] = self._waiting[:count]
        self._waiting = self._waiting[count:]
        self._position += count
        return count

    def _fill(self) -> bool:
        """Unpack until bytes are available. Returns False at the end of the content."""
        while not len(self._waiting):
            if self._is_at_end:
                return False
            data = self._file.read(_INPUT)
            self.packed_bytes += len(data)
            self._waiting = memoryview(self._unpack(data))
        return True

    def _describe(self, error: Exception, why: str) -> Problem:
        """Return the problem of an archive that cannot be unpacked: an exceeded limit, or damage."""
        path, name = str(self._path), self._codec.name
        said = str(error).casefold()
        # The library has a single type of error, with a stable text per error (ZSTD_getErrorString).
        if isinstance(error, MemoryError) or "memory" in said or "allocat" in said:
            what = f"needs more memory to be unpacked than there is: its {name} window is too large"
            remedy = (
                "Give the process more memory, or compress the file again with a smaller window: "
                "zstd -d --long=31 FILE, then zstd --long=27"
            )
            return Problem(path, what, why, remedy)
        if "dictionary" in said:
            what = f"was compressed with a {name} dictionary, which is a separate file"
            return Problem(
                path, what, why, "Unpack it with that file: zstd -d -D DICTIONARY"
            )
        if "unsupported" in said or "version" in said:
            what = f"is in a form of {name} that cannot be read here"
            return Problem(path, what, why, "Unpack it with the program that wrote it")
        what = f"is damaged: its {name} archive cannot be unpacked before byte {self.packed_bytes}"
        return Problem(path, what, why, "Copy it again, or make it again")

    def _unpack(self, data: bytes) -> bytes:
        """Unpack the next compressed bytes. Empty ``data`` marks the end of the file."""
        path, name = str(self._path), self._codec.name
        before = f"{self._position} bytes were unpacked before that"
        parts = []
        is_end = not data
        while data:
            if self._unpacker.eof:
                # A file may consist of several archives. Skip zeros that pad a gzip file to a block size.
                data = data.lstrip(b"\0") if name == "gzip" else data
                if not data:
                    break
                self._unpacker = self._codec.begin()
            try:
                parts.append(self._unpacker.decompress(data))
            except (self._codec.error, MemoryError) as error:
                raise DataError(self._describe(error, f"{before}; {error}")) from error
            data = self._unpacker.unused_data if self._unpacker.eof else b""
        if is_end:
            self._is_at_end = True
            if not self._unpacker.eof:
                what = f"ends within its {name} archive, after byte {self.packed_bytes}"
                why = f"{before}; the file was cut short"
                raise DataError(Problem(path, what, why, "Copy it again"))
        return b"".join(parts)
