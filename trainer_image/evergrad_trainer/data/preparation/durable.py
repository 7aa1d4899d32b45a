"""Files that are whole or absent: written aside, fsynced, renamed; and what a failing disk means
to the user."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.errors import DataError

_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the body into a DataError that names the file and says what to do.

    ``path``: where the body writes.
    """
    try:
        yield
    except OSError as error:
        raise DataError(disk_problem(error, path)) from error


def disk_problem(error: OSError, path: Path) -> Problem:
    """The user's view of an OSError met while prepared data was written or read below ``path``."""
    where = str(error.filename or path)
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        remedy = f"Free space on the file system of {path} (prepared data no run uses any more, unfinished"
        remedy += " .tmp-* attempts), or set"
        return Problem(
            where,
            "could not be written",
            f"{reason}",
            f"{remedy} data.preparedDirectory to a larger one, and start again",
        )
    if error.errno in _FORBIDDEN:
        return Problem(
            where,
            "may not be written",
            reason,
            "Change its permissions, or set data.preparedDirectory to a directory that can be written",
        )
    return Problem(
        where,
        "could not be read or written",
        reason,
        "Check the path and the file system, and start again",
    )


def fsync_directory(directory: Path) -> None:
    """Make the names inside ``directory`` durable."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, aside: Path | None = None) -> None:
    """Write ``value`` to ``path``: readers see the old file or the whole new one.

    ``aside``: where the temporary file is made.
    """
    temporary = (aside or path.parent) / f".{path.name}.{unique_suffix()}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(value, file, separators=(",", ":"), sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)


def unique_suffix() -> str:
    """Different for every call of every process, also on several machines."""
    return f"{os.getpid()}-{os.urandom(6).hex()}"
