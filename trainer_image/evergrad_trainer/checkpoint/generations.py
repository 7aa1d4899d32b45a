"""The fencing token on the volume. Only the process with the highest claimed generation may write."""

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Final

from evergrad_manifest.errors import Problem
from evergrad_trainer.base.durable import fsync_directory, write_new
from evergrad_trainer.base.errors import FencedError, RunDirectoryError, VolumeError
from evergrad_trainer.base.host_errors import is_no_space
from evergrad_trainer.base.volume import retry, volume_error
from evergrad_trainer.checkpoint.layout import (
    GENERATIONS,
    generation_name,
    parse_generation_name,
)


def claim_generation(directory: Path) -> int:
    """Claim the next free generation of a ``checkpoints`` directory and return it.

    Only rank 0 calls this, once per start. The directory is created if it does not exist. The claim is
    durable when this function returns. Raises VolumeError if the directory cannot be written, and
    RunDirectoryError if the path cannot be a directory.
    """

    def claim() -> int:
        (directory / GENERATIONS).mkdir(parents=True, exist_ok=True)
        # Claims are never removed. If a stale listing makes a used number look free, the exclusive create
        # fails and the loop tries the next number. A failed claim only leaves an unused number.
        generation = newest_generation(directory) + 1
        while True:
            try:
                write_new(directory / GENERATIONS / generation_name(generation), _claim())
            except FileExistsError:
                generation += 1
            else:
                break
        # The claim and its folder must be durable before any code relies on the claim.
        fsync_directory(directory / GENERATIONS)
        fsync_directory(directory)
        return generation

    try:
        return retry(claim, where=directory, what=_NOT_RECORDED)
    except OSError as error:
        raise _not_recorded(directory, error) from error


def claim_exactly(directory: Path, generation: int) -> None:
    """Claim the given ``generation``, which the coordinator has assigned, for this process.

    On a full volume the file may remain empty, because its name is the claim. Raises FencedError if this or a
    newer generation is already claimed, VolumeError if the directory cannot be written, and RunDirectoryError
    if the path cannot be a directory.
    """
    path = directory / GENERATIONS / generation_name(generation)
    mine, is_made = _claim(), False

    def claim() -> None:
        nonlocal is_made
        (directory / GENERATIONS).mkdir(parents=True, exist_ok=True)
        if is_made and path.exists() and mine.startswith(path.read_bytes()):
            # An earlier attempt of this process created this file and failed afterwards. The file may contain
            # only a part of the claim.
            path.unlink()
        check_fence(directory, generation - 1)
        with path.open("xb", buffering=0) as file:
            is_made = True
            try:
                file.write(mine)
                os.fsync(file.fileno())
            except OSError as error:
                # The fence reads only names, so an empty file is enough. Ranks that hold the state continue
                # training even if the volume is full and no checkpoint can be saved.
                if not is_no_space(error):
                    raise
        fsync_directory(directory / GENERATIONS)

    try:
        retry(claim, where=directory, what=_NOT_RECORDED)
    except FileExistsError:
        # Another process has claimed this number. Raise the same error as for a newer claim.
        check_fence(directory, generation - 1)
        raise
    except OSError as error:
        raise _not_recorded(directory, error) from error


def check_fence(directory: Path, generation: int, *, fresh: bool = False) -> None:
    """Raise FencedError if a newer process has claimed a ``checkpoints`` directory.

    With ``fresh``, the directory is read from the server of a network volume and not from this host's cache.
    Raises OSError if the directory cannot be read.
    """
    newest = newest_generation(directory, fresh=fresh)
    if newest > generation:
        raise FencedError(
            Problem(
                str(directory),
                f"generation {newest} has claimed this run directory",
                why=f"this process is generation {generation} and must not write any more",
                remedy="Start a run directory only once at a time",
            )
        )


def newest_generation(directory: Path, *, fresh: bool = False) -> int:
    """Return the highest generation that was ever claimed in a ``checkpoints`` directory, or 0.

    ``fresh`` is described at :func:`check_fence`. Raises OSError if the directory cannot be read.
    """
    claims = directory / GENERATIONS
    if fresh:
        # An NFS client may return a cached listing that is up to a minute old. A change of the directory's
        # times makes the client request the listing from the server.
        os.utime(claims)
    numbers = (parse_generation_name(name) for name in os.listdir(claims))
    return max((number for number in numbers if number is not None), default=0)


def _claim() -> bytes:
    """Return the content of a claim, which identifies this process to users and to ``claim_exactly``."""
    claim = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
    return json.dumps(claim).encode() + b"\n"


_NOT_RECORDED: Final = "this start cannot be recorded"
_NO_DIRECTORY: Final = (
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)


def _not_recorded(directory: Path, error: OSError) -> RunDirectoryError | VolumeError:
    """Return the error for a failed claim.

    If the path cannot be a directory, the manifest is wrong. Any other error is a problem of the volume or of
    this host.
    """
    if error.errno in _NO_DIRECTORY:
        remedy = "Give the run a directory that can be written and has free space"
        return RunDirectoryError(
            Problem(str(directory), _NOT_RECORDED, why=str(error), remedy=remedy)
        )
    return volume_error(error, directory, _NOT_RECORDED)
