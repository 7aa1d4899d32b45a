"""Converts errors of the disk with prepared data to problems with a remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import DataError
from evergrad_trainer.base.host_errors import is_no_space

_FORBIDDEN: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Convert an OSError of the body to a DataError with the file and a remedy.

    ``path``: the directory that the body writes to.
    """
    try:
        yield
    except OSError as error:
        raise DataError(disk_problem(error, path)) from error


def disk_problem(error: OSError, path: Path) -> Problem:
    """Return the problem of an OSError that occurred while prepared data was read or written in ``path``."""
    where = str(error.filename or path)
    reason = error.strerror or str(error)
    if is_no_space(error) or error.errno == errno.EFBIG:
        remedy = (
            f"Free space on the file system of {path} (prepared data no run uses any more, unfinished "
            ".tmp-* attempts), or set data.preparedDirectory to a larger one, and start again"
        )
        return Problem(where, "could not be written", reason, remedy)
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
