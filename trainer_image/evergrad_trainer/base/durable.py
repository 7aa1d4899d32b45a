"""Durable writes: after a power failure, a file and its name are either complete or absent."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's name to any OSError raised in the body, for calls that only take a descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_all(descriptor: int, data: memoryview) -> None:
    """Write every byte of ``data``, with several writes if necessary.

    Raises OSError, for example if the disk becomes full after a part of ``data`` was written.
    """
    while data:
        data = data[os.write(descriptor, data) :]


def write_new(path: Path, data: bytes) -> None:
    """Create ``path``, which must not exist, and write ``data`` durably.

    The directory entry is not yet durable. Call ``fsync_directory`` to make it durable. Raises OSError.
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
    """Replace the content of ``path`` with ``data`` atomically and durably.

    A reader sees either the old or the new content, and so does a machine after a power failure. ``aside`` is
    the directory of the temporary file, on the same file system; the default is the directory of ``path``. If
    the process is killed, a file may remain whose name ``is_temporary`` accepts. Raises OSError. If the write
    fails, ``path`` still has its old content.
    """
    # The name is unique, because otherwise two writers could write to the same file.
    temporary = (aside or path.parent) / f".{path.name}.{unique_suffix()}{_TEMPORARY}"
    try:
        write_new(temporary, data)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    # Without this fsync, a power failure could undo the rename after the caller has relied on it.
    fsync_directory(path.parent)


def write_json(
    path: Path,
    value: Any,
    *,
    aside: Path | None = None,
) -> None:
    """Replace ``path`` durably with ``value`` as JSON. Equal values produce equal bytes."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    replace_durably(path, text.encode(), aside=aside)


def is_temporary(name: str, of: str) -> bool:
    """Return whether ``name`` is the name of a temporary file that ``replace_durably`` made for ``of``.

    For example, ``is_temporary(".latest.17-0a1b2c3d4e5f.tmp", "latest")`` is true.
    """
    return name.startswith(f".{of}.") and name.endswith(_TEMPORARY)


def fsync_file(path: Path) -> None:
    """Make the data that any process has written to ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_directory(path: Path) -> None:
    """Make created, renamed and removed names in ``path`` survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unique_suffix() -> str:
    """Return a string that is different for every call in every process.

    A process ID alone is not unique, because the first processes of all pods that share a volume have the
    same ID.
    """
    return f"{os.getpid()}-{os.urandom(6).hex()}"


_TEMPORARY = ".tmp"
