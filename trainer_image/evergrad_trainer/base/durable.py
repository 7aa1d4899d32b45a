"""Durable writing: files and names that are whole or absent, also after a power cut."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError of a call that only knows its descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte of ``data``; a full disk may take a part of it first and refuse the rest."""
    while data:
        data = data[os.write(descriptor, data) :]


def write_new(path: Path, data: bytes) -> None:
    """Create ``path``, which must not exist, with ``data`` on the disk when this returns.

    Its directory entry is not yet durable: ``fsync_directory`` makes it so.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with naming(path):
            write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(
    path: Path,
    data: bytes,
    *,
    aside: Path | None = None,
) -> None:
    """Give ``path`` the content ``data``: a reader, or a machine that loses power, sees the old or the new.

    ``aside``: directory of the temporary file, on the same file system; by default the one of ``path``.
    Raises OSError; ``path`` is then untouched. A kill may leave a file whose name ``is_temporary`` accepts.
    """
    # A name that no other writer has: two of them would otherwise write into one file.
    temporary = (aside or path.parent) / f".{path.name}.{unique_suffix()}{_TEMPORARY}"
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # Without this a power cut could undo the rename after the caller has relied on it.
    fsync_directory(path.parent)


def write_json(
    path: Path,
    value: Any,
    *,
    aside: Path | None = None,
) -> None:
    """Replace ``path`` durably by the JSON text of ``value``; equal values give equal bytes."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    replace_durably(path, text.encode(), aside=aside)


def is_temporary(name: str, of: str) -> bool:
    """Whether ``name`` is that of a temporary file of ``replace_durably`` for a file called ``of``."""
    return name.startswith(f".{of}.") and name.endswith(_TEMPORARY)


def fsync_file(path: Path) -> None:
    """Make what any process has written into ``path`` survive a power cut. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make names created, renamed or removed in ``path`` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unique_suffix() -> str:
    """A text that differs for every call of every process.

    A process number alone would not do: the first processes of all pods that share a volume have the same.
    """
    return f"{os.getpid()}-{os.urandom(6).hex()}"


_TEMPORARY = ".tmp"
