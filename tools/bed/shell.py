"""Runs commands. The error of a failed command contains the command and its output."""

import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class BedError(Exception):
    """The bed cannot perform an operation. The message contains the reason and a remedy."""


def run(
    command: Sequence[object],
    *,
    text: str | None = None,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    timeout: float = 600,
    check: bool = True,
) -> str:
    """Run a command and return its stdout.

    `environment` is added to our environment. Raises BedError with the last lines of the output.
    """
    words = [str(word) for word in command]
    try:
        result = subprocess.run(
            words,
            input=text,
            stdin=subprocess.DEVNULL if text is None else None,
            capture_output=True,
            text=True,
            env={**os.environ, **(environment or {})},
            cwd=directory,
            timeout=timeout,
            check=False,
        )
    except FileNotFoundError as error:
        raise BedError(
            f"{words[0]}: not found. Install the package that brings it."
        ) from error
    except subprocess.TimeoutExpired as error:
        raise BedError(f"{' '.join(words)}: not done after {timeout:g} s.") from error
    if check and result.returncode != 0:
        said = "\n".join((result.stdout + result.stderr).strip().splitlines()[-20:])
        raise BedError(f"{' '.join(words)}: exit code {result.returncode}.\n{said}")
    return result.stdout


def git(*words: object, directory: Path) -> str:
    """Run git and return its stdout, also in a folder of another user. Raises BedError."""
    return run(["git", "-c", "safe.directory=*", *words], directory=directory)


def wait_until(
    what: str, condition: Callable[[], bool], *, seconds: float, pause: float = 0.05
) -> float:
    """Wait until the condition is true, and return the seconds. Raises BedError, naming `what`, after
    `seconds`."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > seconds:
            raise BedError(f"{what}: not so after {seconds:g} s.")
        time.sleep(pause)
    return time.monotonic() - begun


def last_lines(file: Path, number: int = 15) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        return "\n".join(file.read_text(errors="replace").splitlines()[-number:])
    except OSError as error:
        return f"({error})"
