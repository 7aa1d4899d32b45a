"""Reads a file as it is or unpacked: gzip and zstandard, known by their first bytes and not by the name."""

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
"""A zstandard frame without content, which some writers begin with, from its second byte on."""
_WINDOW_LOG: Final = 31
"""Largest window of a zstandard frame that is read, as a power of two: the format's own limit on 64-bit
machines, which `zstd --long=31` writes. The library's default, 2**27, is below what public dumps have."""
_INPUT: Final = 2**15
"""Compressed bytes that are unpacked at a time. A block of zeros grows some 40,000 times: a gibibyte at most
is in memory, whoever made the file."""


class _Unpacker(Protocol):
    """One member of a gzip file or frame of a zstandard file, as the libraries of both have it."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True)
class _Codec:
    """A format: ``begin`` makes an unpacker for the next member or frame, which raises ``error``."""

    name: str
    begin: Callable[[], _Unpacker]
    error: type[Exception]


def is_packed(path: Path) -> bool:
    """Whether the file is compressed. Raises OSError."""
    with path.open("rb", buffering=0) as file:
        return _format_of(file.read(4)) is not None


def open_content(path: Path) -> io.RawIOBase:
    """The content of a file, unpacked where it is compressed, from its beginning. Unbuffered.

    Where it is compressed, ``seek`` only continues. Raises OSError, and DataError where the format cannot be
    read here; reading raises DataError for an archive that is damaged or cut short.
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
    """Python's own from 3.14 on, else the package. Raises DataError where there is neither."""
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
    """The content of a compressed file: that of its members or frames, one after the other."""

    def __init__(self, path: Path, codec: _Codec) -> None:
        self._path = path
        self._codec = codec
        self._unpacker = codec.begin()
        self._file = path.open("rb", buffering=0)
        self._waiting = memoryview(b"")
        self._position = 0
        self._is_at_end = False
        self.packed_bytes = 0
        """Bytes of the file that were read so far."""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def seek(self, offset: int, whence: int = 0) -> int:
        """Continue to ``offset``; what lies between is unpacked and left."""
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
        """Unpack until there is something; False at the end of the content."""
        while not len(self._waiting):
            if self._is_at_end:
                return False
            data = self._file.read(_INPUT)
            self.packed_bytes += len(data)
            self._waiting = memoryview(self._unpack(data))
        return True

    def _describe(self, error: Exception, why: str) -> Problem:
        """The problem of an archive that the library does not unpack: a limit, or damage."""
        path, name = str(self._path), self._codec.name
        said = str(error).casefold()
        # The library has one type of error for all, and a stable text for each (ZSTD_getErrorString).
        if isinstance(error, MemoryError) or "memory" in said or "allocat" in said:
            what = f"needs more memory to be unpacked than there is: its {name} window is too large"
            remedy = (
                "Give the process more memory, or compress the file again with a smaller window: "
                "zstd -d --long=31 FILE, then zstd --long=27"
            )
            return Problem(path, what, why, remedy)
        if "dictionary" in said:
            what = f"was compressed with a {name} dictionary, which is a file of its own"
            return Problem(
                path, what, why, "Unpack it with that file: zstd -d -D DICTIONARY"
            )
        if "unsupported" in said or "version" in said:
            what = f"is in a form of {name} that cannot be read here"
            return Problem(path, what, why, "Unpack it with the program that wrote it")
        what = f"is damaged: its {name} archive cannot be unpacked before byte {self.packed_bytes}"
        return Problem(path, what, why, "Copy it again, or make it again")

    def _unpack(self, data: bytes) -> bytes:
        """The content of the next compressed bytes; none of them is the end of the file."""
        path, name = str(self._path), self._codec.name
        before = f"{self._position} bytes were unpacked before that"
        parts = []
        is_end = not data
        while data:
            if self._unpacker.eof:
                # Several archives joined are one. Zeros fill a gzip file up to the size of a block.
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
