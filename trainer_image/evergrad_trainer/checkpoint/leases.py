"""Leases: a reader beside the run keeps a checkpoint from being retired, for as long as the reader lives.

A lease is a small file that its holder touches every few seconds. It ends with its file, or when it was not
touched for a while, so that a reader that was killed holds nothing for long. All times are those that the
volume gives its files: no clocks of two hosts are compared.
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
"""How long a lease lasts after it was touched: a volume may be away for a while."""
RENEWAL_SECONDS: Final = 20.0
"""How often a holder touches its lease: several times, before it ends."""

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def hold(directory: Path, checkpoint: str) -> Iterator[None]:
    """Keep a checkpoint of a ``checkpoints`` directory from being retired. Raises OSError where that cannot
    be written.

    The checkpoint may have been retired just before: whoever holds it looks whether it is there.
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
                # This process stood still for too long, and somebody has tidied up.
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
    """Make the folder of leases, which all who read the run write to, as its parent is.

    Otherwise the reader who comes first, such as root, would keep out the run's own user. As far as this is
    permitted: a reader of the same user need change nothing.
    """
    try:
        folder.mkdir()
    except FileExistsError:
        return
    parent = folder.parent.stat()
    # In this order: whoever has given it away may no longer change it. The group may be the only part that is
    # permitted.
    with contextlib.suppress(OSError):
        os.chmod(folder, stat.S_IMODE(parent.st_mode))
    with contextlib.suppress(OSError):
        os.chown(folder, -1, parent.st_gid)
    with contextlib.suppress(OSError):
        os.chown(folder, parent.st_uid, -1)


@contextlib.contextmanager
def hold_if_possible(directory: Path, checkpoint: str) -> Iterator[None]:
    """As ``hold``, for a reader that continues where no lease can be written."""
    with contextlib.ExitStack() as stack:
        # Retention follows a save, which writes this. Anything else is a copy, which nobody retires.
        if (directory / LATEST).exists():
            try:
                stack.enter_context(hold(directory, checkpoint))
            except OSError as error:
                _log.warning(
                    "%s: cannot be held while it is read, and a run that trains may remove it: %s",
                    directory / checkpoint,
                    error,
                )
        yield


def find_leased(directory: Path, *, now: float) -> set[str]:
    """Names of the checkpoints that somebody reads; leases that have ended are removed.

    ``now``: what the volume gives a file that is written now. Raises OSError for trouble of the volume, and
    not for what belongs to another user: that would not pass, and a run without retention fills its volume.
    """
    try:
        leases = list_entries(directory / LEASES)
    except PermissionError as error:
        _log.warning(
            "retention passes over nothing: the leases cannot be listed: %s", error
        )
        return set()
    names = set()
    for path in leases:
        with contextlib.suppress(FileNotFoundError):
            # Also where it lies in the future: the volume's clock was set back, and a living holder is
            # stamped by it as it is now.
            if abs(now - path.stat().st_mtime) > LEASE_SECONDS:
                # It has ended, whether or not it may be removed.
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            try:
                names.add(str(json.loads(path.read_bytes())["checkpoint"]))
            except FileNotFoundError:
                raise
            except (OSError, ValueError, TypeError, KeyError):
                # It is being written, or cannot be read. Its name says the same, for as long as no
                # checkpoint's name ends like a suffix.
                names.add(path.name.rpartition(".")[0])
    names.discard("")
    return names
