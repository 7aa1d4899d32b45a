"""Trouble of a volume that may pass: which calls are tried again, for how long, and the error where it does
not pass."""

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
"""How long an operation is tried again while others wait for this process: longer than a server takes to fail
over to another."""
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
"""Errors that another try may not meet again: those of a host, except for a mount that stays as it is."""

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


def volume_error(error: OSError, where: Path | str, what: str) -> VolumeError:
    """Make ``error`` trouble of the volume, or of the host it happened on."""
    reason, trouble = (
        error.strerror or str(error) or type(error).__name__,
        trouble_of(error),
    )
    if trouble == "no_space":
        # Every host meets a full volume: only a person can make room.
        remedy = "Delete what is not needed there, or enlarge the volume or its quota"
    else:
        remedy = (
            "The run itself is not at fault: it is tried again, on another host if there is one. "
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
    """Call ``call``, again with growing pauses while it raises a PASSING error. Any other OSError is raised
    as it is.

    Raises VolumeError once the pauses add up to the patience. They are counted, not measured: one call may
    hang for long.
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
        # Growing: a moment's trouble costs little, and a server that fails over is not asked all the time.
        time.sleep(pause)
        waited, pause = waited + pause, min(2 * pause, _LONGEST_PAUSE_SECONDS)
