"""A lock that lets one process at a time do what several might.

Correctness of a run never rests on it: where a volume has no locks, or nobody waits any longer, the body runs
all the same, and is told.
"""

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_POLL_SECONDS: Final = 0.1
_UNSUPPORTED: Final = frozenset({errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP})


@contextmanager
def exclusive(
    path: Path, *, is_done: Callable[[], bool], on_wait: Callable[[], None]
) -> Iterator[bool]:
    """Hold the lock at ``path`` during the body, which gets True. ``on_wait`` is called while another process
    holds it.

    The body gets False, and no lock, when ``is_done`` became true meanwhile or the file system has no locks.
    The kernel frees the lock of a killed process. Raises OSError.
    """
    descriptor = _acquire(path, is_done=is_done, on_wait=on_wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            # Removed while it is held: whoever waits on it sees that its file is gone and tries the new one.
            with suppress(OSError):
                path.unlink(missing_ok=True)
            os.close(descriptor)


def _acquire(
    path: Path, *, is_done: Callable[[], bool], on_wait: Callable[[], None]
) -> int | None:
    while not is_done():
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The file may have been removed, and made again by another process, before it was locked here.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    return descriptor
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                os.close(descriptor)
                return None
            if not isinstance(error, BlockingIOError):
                os.close(descriptor)
                raise
            # In short pauses rather than one blocking call: the other process may have published before it
            # lets go, and the user is shown that there is a wait.
            on_wait()
            time.sleep(_POLL_SECONDS)
        os.close(descriptor)
    return None
