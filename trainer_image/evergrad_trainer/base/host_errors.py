"""Errors of the operating system that are trouble of one host or one moment, not a mistake of the run's
author."""

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
"""Errors of a mount, a volume, a disk, or this process's share of its machine (EAGAIN: one process too many).

ENOENT is not among them: a file that a manifest names should be there on every host.
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
    """Whether another host, or this one at another time, may do better."""
    return isinstance(error, OSError) and error.errno in HOST_ERRNOS


def trouble_of(error: BaseException) -> Trouble:
    """The trouble that an error is about, as a value of the vocabulary of causes: the error's own
    ``trouble``, or the number of the operating system's error that it was raised from."""
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
    """Whether the volume, or the share of it that this user may fill, is full."""
    return trouble_of(error) == "no_space"


def describe_host_trouble(error: BaseException) -> str | None:
    """The trouble of this host, where that is all that ``error`` is about; None where a person must mend
    something."""
    if isinstance(error, EvergradError) and error.kind is ErrorKind.ENVIRONMENT:
        return str(error)
    # Several problems at once: one mistake among them is enough to need a person.
    if (
        isinstance(error, InputError)
        and error.problems
        and all(problem.is_of_host for problem in error.problems)
    ):
        return str(error)
    cause: BaseException | None = error
    # An error of ours that was raised from one of the operating system.
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    return str(error) if cause is not None and is_host_trouble(cause) else None


def kind_of_script_error(error: BaseException) -> ErrorKind:
    """The kind of an exception that a script of the user's own ended with.

    Only what a file system alone says counts as the host's: a service that does not answer, or a permission
    that was never given, is more often the script's.
    """
    is_volume = isinstance(error, OSError) and error.errno in _VOLUME_ERRNOS
    return ErrorKind.ENVIRONMENT if is_volume else ErrorKind.INTERNAL
