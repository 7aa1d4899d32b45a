"""Classifies operating-system errors: problems of one host or one moment, or mistakes of the run's author."""

import errno
from collections.abc import Mapping
from typing import Final

from evergrad_common.causes import Trouble
from evergrad_common.contract import ErrorKind
from evergrad_manifest.errors import EvergradError, InputError

HOST_ERRNOS: Final = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETUNREACH,
        errno.ENOTCONN,
        errno.ESHUTDOWN,
        errno.ENODEV,
        errno.ENXIO,
        errno.EROFS,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EPERM,
        errno.EBUSY,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EREMOTEIO,
    }
)
"""Errors of a mount, a volume, a disk, or the resource limits of this process (EAGAIN: too many processes).

ENOENT is not included, because a file that a manifest names should exist on every host.
"""


_TROUBLES: Final[Mapping[int, Trouble]] = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.EACCES: "permission",
    errno.EPERM: "permission",
    errno.ETIMEDOUT: "timeout",
}
_VOLUME_ERRNOS: Final = frozenset({errno.EIO, errno.ESTALE, errno.EREMOTEIO})


def is_host_trouble(error: BaseException) -> bool:
    """Return whether the same call may succeed on another host, or on this host at another time."""
    return isinstance(error, OSError) and error.errno in HOST_ERRNOS


def trouble_of(error: BaseException) -> Trouble:
    """Return the cause of ``error`` as a ``Trouble`` value.

    The result is the ``trouble`` attribute of the error or of an error that it was raised from. If there is
    none, the errno of the underlying OSError determines the result. For example, ENOSPC gives ``no_space``.
    Without an OSError, the result is ``other``.
    """
    cause: BaseException | None = error
    while cause is not None:
        own: Trouble | None = getattr(cause, "trouble", None)
        if own is not None:
            return own
        if isinstance(cause, OSError):
            return _TROUBLES.get(cause.errno or 0, "io")
        cause = cause.__cause__
    return "other"


def is_no_space(error: BaseException) -> bool:
    """Return whether the volume, or this user's quota on it, is full."""
    return trouble_of(error) == "no_space"


def describe_host_trouble(error: BaseException) -> str | None:
    """Return the message of ``error`` if only this host caused it; None if a user must fix something."""
    if isinstance(error, EvergradError) and error.kind is ErrorKind.ENVIRONMENT:
        return str(error)
    # An InputError may contain several problems. If only one of them is a mistake, a user must fix it.
    if (
        isinstance(error, InputError)
        and error.problems
        and all(problem.is_of_host for problem in error.problems)
    ):
        return str(error)
    cause: BaseException | None = error
    # Find the OSError that this error was raised from.
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return str(error) if cause is not None and is_host_trouble(cause) else None


def kind_of_script_error(error: BaseException) -> ErrorKind:
    """Return the kind of an exception that ended a user's script.

    Only errors that a file system alone raises count as a problem of the host. A service that does not
    respond or a missing permission is more often a problem of the script.
    """
    is_volume = isinstance(error, OSError) and error.errno in _VOLUME_ERRNOS
    return ErrorKind.ENVIRONMENT if is_volume else ErrorKind.INTERNAL
