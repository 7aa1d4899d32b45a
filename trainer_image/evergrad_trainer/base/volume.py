"""Retries of volume operations: which errors are retried, for how long, and the error if retries fail."""

import errno
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import VolumeError
from evergrad_trainer.base.host_errors import HOST_ERRNOS, trouble_of

PATIENCE_SECONDS: Final = 20.0
"""How long an operation is retried while other processes wait for this process. A storage server fails over
to another server within this time."""
_FIRST_PAUSE_SECONDS: Final = 0.05
_LONGEST_PAUSE_SECONDS: Final = 2.0
_NOT_BY_WAITING: Final = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_ONLY_FOR_A_MOMENT: Final = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.ENOLCK,
        errno.ENETDOWN,
        errno.ECONNRESET,
        errno.ECONNREFUSED,
    }
)
PASSING: Final = (HOST_ERRNOS - _NOT_BY_WAITING) | _ONLY_FOR_A_MOMENT
"""Errnos that a retry may cure: the errnos of host errors, except for a read-only mount and missing
permissions, plus errnos of momentary conditions."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def volume_error(error: OSError, where: Path | str, what: str) -> VolumeError:
    """Build a VolumeError from ``error``.

    ``where`` is the path and ``what`` describes the failed operation, such as "the checkpoint cannot be
    read". The remedy in the message depends on the errno.
    """
    reason, trouble = (
        error.strerror or str(error) or type(error).__name__,
        trouble_of(error),
    )
    if trouble == "no_space":
        # A retry on another host would also fail on a full volume. Only a user can free space.
        remedy = "Delete what is not needed there, or enlarge the volume or its quota"
    else:
        remedy = (
            "The run is not the cause. It is tried again, on another host if possible. "
            "Check the volume, its quota and its server"
        )
    return VolumeError(str(Problem(str(where), what, reason, remedy)), trouble)


def retry(
    call: Callable[[], Result],
    *,
    where: Path | str,
    what: str,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Result:
    """Call ``call`` and return its result; retry with growing pauses while it raises a PASSING error.

    Any other OSError is raised unchanged. Raises VolumeError when the pauses add up to ``patience_seconds``.
    The time inside ``call`` does not count, because one call may hang for a long time.
    """
    pause, waited = _FIRST_PAUSE_SECONDS, 0.0
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in PASSING:
                raise
            if waited >= patience_seconds:
                raise volume_error(error, where, what) from error
            _log.warning("%s: %s: %s; tried again in %.2f s", where, what, error, pause)
        # The pauses grow from 0.05 s to 2 s: a momentary error costs little time, and a server that fails
        # over does not receive too many requests.
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
