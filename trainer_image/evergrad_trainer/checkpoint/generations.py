"""The fencing token on the volume: the process with the highest claimed generation may write, no other."""

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
    """Claim the next free generation of a ``checkpoints`` directory, which is made if need be. Rank 0 of each
    start only.

    The claim is durable when this returns. Raises VolumeError if the directory cannot be written,
    RunDirectoryError if it can be none.
    """

    def claim() -> int:
        (directory / GENERATIONS).mkdir(parents=True, exist_ok=True)
        # Numbers are never removed, so that a stale listing cannot make a used one look free: the create
        # refuses it. A claim that failed half-way leaves a number that nobody uses.
        generation = newest_generation(directory) + 1
        while True:
            try:
                write_new(directory / GENERATIONS / generation_name(generation), _claim())
            except FileExistsError:
                generation += 1
            else:
                break
        # The name and its folder, before anything rests on the claim.
        fsync_directory(directory / GENERATIONS)
        fsync_directory(directory)
        return generation

    try:
        return retry(claim, where=directory, what=_NOT_RECORDED)
    except OSError as error:
        raise _not_recorded(directory, error) from error


def claim_exactly(directory: Path, generation: int) -> None:
    """Claim ``generation``, whose number somebody else has given out, for this process.

    On a full volume the file may stay empty: its name is the claim. Raises FencedError if it or a newer one
    is claimed already, VolumeError if the directory cannot be written, RunDirectoryError if it can be none.
    """
    path = directory / GENERATIONS / generation_name(generation)
    mine, is_made = _claim(), False

    def claim() -> None:
        nonlocal is_made
        (directory / GENERATIONS).mkdir(parents=True, exist_ok=True)
        if is_made and path.exists() and mine.startswith(path.read_bytes()):
            # From a try of this very process that failed behind it; only a part of it may be there.
            path.unlink()
        check_fence(directory, generation - 1)
        with path.open("xb", buffering=0) as file:
            is_made = True
            try:
                file.write(mine)
                os.fsync(file.fileno())
            except OSError as error:
                # The fence reads names alone. Those who hold the state train on where nothing can be saved.
                if not is_no_space(error):
                    raise
        fsync_directory(directory / GENERATIONS)

    try:
        retry(claim, where=directory, what=_NOT_RECORDED)
    except FileExistsError:
        # Another process took this very number: the same error as for a newer one.
        check_fence(directory, generation - 1)
        raise
    except OSError as error:
        raise _not_recorded(directory, error) from error


def check_fence(directory: Path, generation: int, *, fresh: bool = False) -> None:
    """Raise FencedError if a newer process has claimed a ``checkpoints`` directory; OSError if it cannot be
    read.

    ``fresh`` asks a network volume for the directory as it is now, not as this machine remembers it.
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
    """The highest generation that was ever claimed in a ``checkpoints`` directory; 0 if none was."""
    claims = directory / GENERATIONS
    if fresh:
        # An NFS client may answer from a listing that is up to a minute old. Changing the directory makes it
        # ask again.
        os.utime(claims)
    numbers = (parse_generation_name(name) for name in os.listdir(claims))
    return max((number for number in numbers if number is not None), default=0)


def _claim() -> bytes:
    """The content of a claim: for people who look into the directory, and to recognise this process."""
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
    """Only a path that can be no directory is a mistake of the manifest; a mount that cannot be written is
    this host's."""
    if error.errno in _NO_DIRECTORY:
        remedy = "Give the run a directory that can be written and has free space"
        return RunDirectoryError(
            Problem(str(directory), _NOT_RECORDED, why=str(error), remedy=remedy)
        )
    return volume_error(error, directory, _NOT_RECORDED)
