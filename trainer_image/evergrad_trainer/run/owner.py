"""Records which ``evergrad run`` of this machine trains in a run directory, and refuses a second process.

Of processes on several machines or in several containers, the newest takes precedence, because it claims the
checkpoints.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Iterator

from evergrad_common.contract import RunFile
from evergrad_coordinator.edge.training_process import (
    Owner,
    describe_self,
    locked_record,
    parse_owner,
    read_owner,
    write_owner,
)
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.errors import RunDirectoryError
from evergrad_trainer.run.directory import RunDirectory, parse_object

TAKE_OVER = "--take-over"
_TAIL_BYTES = 1 << 16
"""Number of bytes at the end of ``metrics.jsonl`` that are read for its last row; a row is below 4 KiB."""
_KILL_SECONDS = 10.0
"""Maximum time for a process and its children to end after SIGKILL."""


@contextlib.contextmanager
def own_run_directory(directory: RunDirectory) -> Iterator[None]:
    """Record this process as the owner of ``directory`` inside the block.

    Raises RunDirectoryError if another process of this machine trains there. If the record cannot be written,
    the directory is used without it, because other checks report problems of the directory.
    """
    owner = describe_self()
    if owner is not None:
        with contextlib.suppress(OSError):
            directory.path.mkdir(parents=True, exist_ok=True)
            with locked_record(directory.path, create=True) as file:
                _refuse_living(directory, parse_owner(file))
                write_owner(file, owner)
    try:
        yield
    finally:
        # Remove the record only if no later process owns the directory.
        if owner is not None:
            with contextlib.suppress(OSError), locked_record(directory.path) as file:
                if parse_owner(file) == owner:
                    (directory.path / RunFile.OWNER).unlink(missing_ok=True)


def refuse_second_run(directory: RunDirectory) -> None:
    """Raise RunDirectoryError if another process of this machine trains in ``directory``. Writes nothing."""
    _refuse_living(directory, read_owner(directory.path))


def take_over(directory: RunDirectory, *, grace_seconds: float) -> None:
    """End the process of this machine that trains in ``directory``, if there is one, and wait until it exits.

    The process receives SIGTERM, on which it saves its state, and SIGKILL after ``grace_seconds``. Raises
    RunDirectoryError if the process cannot be signalled or does not end.
    """
    owner = read_owner(directory.path)
    if owner is None:
        return
    where = str(directory.path)
    try:
        # The pidfd refers to this process even if its process id is reused.
        process = os.pidfd_open(owner.pid)
    except ProcessLookupError:
        return
    try:
        if not owner.is_alive:
            return
        for number, seconds, what in (
            (signal.SIGTERM, grace_seconds, "is asked to save and to leave"),
            (
                signal.SIGKILL,
                _KILL_SECONDS,
                f"has not left within {grace_seconds:g} s and is killed",
            ),
        ):
            print(
                f"pid {owner.pid}, which trains this run, {what}",
                file=sys.stderr,
                flush=True,
            )
            signal.pidfd_send_signal(process, number)
            if select.select([process], [], [], seconds)[0]:
                return
    except PermissionError as error:
        what, why = f"pid {owner.pid} cannot be ended", "it belongs to another user"
        remedy = "Let its user stop it"
        raise RunDirectoryError(Problem(where, what, why, remedy)) from error
    except ProcessLookupError:
        return
    finally:
        os.close(process)
    what, why = f"pid {owner.pid} does not end", "a device or a file system keeps it"
    raise RunDirectoryError(Problem(where, what, why, "Wait for its end, and start again"))


def _refuse_living(directory: RunDirectory, owner: Owner | None) -> None:
    if owner is None or not owner.is_alive:
        return
    step = _read_last_step(directory)
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.time))
    at = "before its first recorded step" if step is None else f"at step {step}"
    raise RunDirectoryError(
        Problem(
            str(directory.path),
            f"pid {owner.pid} trains this run already, {at}, since {began}",
            "two processes would train the same steps",
            f"Wait for its end, stop it with `kill {owner.pid}` (it saves its state), or start this one with "
            f"{TAKE_OVER}, which does so first",
        )
    )


def _read_last_step(directory: RunDirectory) -> int | None:
    """Return the step of the newest row of ``metrics.jsonl``, or None."""
    try:
        with directory.metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    rows = (parse_object(line) for line in reversed(lines))
    steps = (row.get("step") for row in rows if row is not None)
    return next((step for step in steps if isinstance(step, int)), None)
