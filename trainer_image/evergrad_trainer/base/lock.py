"""A file lock that prevents several processes from doing the same work at the same time.

The correctness of a run never depends on the lock. If the volume has no locks, or if the result already
exists, the body runs without the lock and receives False.
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
    """Hold the lock at ``path`` during the body, which receives True.

    While another process holds the lock, ``on_wait`` is called every 0.1 s. If ``is_done`` becomes true, or
    if the file system has no locks, the body runs without the lock and receives False. The kernel releases
    the lock of a killed process. Raises OSError.
    """
    descriptor = _acquire(path, is_done=is_done, on_wait=on_wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            # The file is removed while the lock is held. A process that gets the lock of the removed file
            # notices the removal and tries again with a new file.
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
            # Another process may have removed and recreated the file before this process locked it.
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
            # Poll instead of blocking: the other process may publish its result before it releases the lock,
            # and ``on_wait`` shows the user that this process is waiting.
            on_wait()
            time.sleep(_POLL_SECONDS)
        os.close(descriptor)
    return None
