"""Errors of the disk that prepared data lies on, as problems that say what to do."""

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
    """Turn an OSError of the body into a DataError that names the file and says what to do.

    ``path``: the directory that the body writes to.
    """
    try:
        yield
    except OSError as error:
        raise DataError(disk_problem(error, path)) from error


def disk_problem(error: OSError, path: Path) -> Problem:
    """The user's view of an OSError met while prepared data was written or read below ``path``."""
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
