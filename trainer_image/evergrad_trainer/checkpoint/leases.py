"""Leases, with which a reader outside the run prevents the removal of a checkpoint while it reads.

A lease is a small file that its holder touches every 20 s. A lease ends when its file is removed or was not
touched for 120 s, so that a killed reader does not hold a checkpoint for longer. All times are file times of
the volume, because the clocks of two hosts may differ.
"""

import contextlib
import json
import logging
import os
import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from evergrad_trainer.base.durable import unique_suffix, write_new
from evergrad_trainer.checkpoint.files import list_entries
from evergrad_trainer.checkpoint.layout import LATEST, LEASES

LEASE_SECONDS: Final = 120.0
"""How long a lease is valid after it was touched. This allows for a volume that is unavailable for a time."""
RENEWAL_SECONDS: Final = 20.0
"""Interval at which a holder touches its lease, so that several attempts fit into LEASE_SECONDS."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(directory: Path, checkpoint: str) -> Iterator[None]:
    """Prevent the removal of ``checkpoint`` in a ``checkpoints`` directory during the body.

    Retention may have removed the checkpoint just before the lease was written. In the body, check that the
    checkpoint exists. Raises OSError if the lease cannot be written.
    """
    path = directory / LEASES / f"{checkpoint}.{unique_suffix()}"
    content = {"checkpoint": checkpoint, "host": socket.gethostname(), "pid": os.getpid()}
    data = json.dumps(content).encode() + b"\n"
    _make_folder(path.parent)
    write_new(path, data)
    is_over = threading.Event()

    def renew() -> None:
        while not is_over.wait(RENEWAL_SECONDS):
            try:
                os.utime(path)
            except FileNotFoundError:
                # This process was suspended for too long, so another process removed the ended lease.
                with contextlib.suppress(OSError):
                    write_new(path, data)
            except OSError as error:
                _log.warning("%s: the lease could not be renewed: %s", path, error)

    thread = threading.Thread(target=renew, name="checkpoint-lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create the folder of leases with the mode, the owner and the group of its parent.

    All readers of the run write to this folder. Without these changes, the first reader, for example root,
    would lock out the run's own user. Changes that are not permitted are skipped, because a reader that runs
    as the same user does not need them.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        return
    parent = folder.parent.stat()
    # The owner is changed last, because a process that is no longer the owner cannot change the folder. The
    # group is changed separately, because it may be the only permitted change.
    with contextlib.suppress(OSError):
        os.chmod(folder, stat.S_IMODE(parent.st_mode))
    with contextlib.suppress(OSError):
        os.chown(folder, -1, parent.st_gid)
    with contextlib.suppress(OSError):
        os.chown(folder, parent.st_uid, -1)


@contextlib.contextmanager
def hold_if_possible(directory: Path, checkpoint: str) -> Iterator[None]:
    """Hold a lease as ``hold`` does; if the lease cannot be written, log a warning and run without it."""
    with contextlib.ExitStack() as stack:
        # Every save writes ``latest`` before retention. A directory without it is a copy, in which retention
        # never runs.
        if (directory / LATEST).exists():
            try:
                stack.enter_context(hold(directory, checkpoint))
            except OSError as error:
                _log.warning(
                    "%s: cannot be protected while it is read, so a run that trains may remove it: %s",
                    directory / checkpoint,
                    error,
                )
        yield


def find_leased(directory: Path, *, now: float) -> set[str]:
    """Return the names of the checkpoints with a valid lease, and remove leases that have ended.

    ``now`` is the time that the volume gives to a file that is written now. Raises OSError for a problem of
    the volume. A folder that belongs to another user is only logged: that problem is permanent, and a run
    without retention would fill its volume.
    """
    try:
        leases = list_entries(directory / LEASES)
    except PermissionError as error:
        _log.warning(
            "leases do not protect checkpoints from retention: they cannot be listed: %s",
            error,
        )
        return set()
    names = set()
    for path in leases:
        with contextlib.suppress(FileNotFoundError):
            # A time in the future also means that the lease has ended: the volume's clock was set back, and a
            # live holder would have touched its lease with the current time since.
            if abs(now - path.stat().st_mtime) > LEASE_SECONDS:
                # The lease has ended, even if this process is not permitted to remove it.
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            try:
                names.add(str(json.loads(path.read_bytes())["checkpoint"]))
            except FileNotFoundError:
                raise
            except (OSError, ValueError, TypeError, KeyError):
                # The lease is still being written or cannot be read. Its file name also contains the name of
                # the checkpoint, before the suffix.
                names.add(path.name.rpartition(".")[0])
    names.discard("")
    return names
