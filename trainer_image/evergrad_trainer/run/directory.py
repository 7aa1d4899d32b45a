"""The run directory on disk: its layout, strict JSON, small files written atomically, JSON lines that survive
a kill."""

import errno
import functools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evergrad_common.contract import RunFile
from evergrad_manifest.errors import Problem
from evergrad_trainer.base.durable import replace_durably, unique_suffix
from evergrad_trainer.base.errors import RunDirectoryError, VolumeError
from evergrad_trainer.base.volume import PASSING, volume_error

_REASONS = {
    errno.EROFS: ("the file system is read-only", "Choose a directory that can be written"),
    errno.EACCES: (
        "permission is denied",
        "Choose a directory this user can write, or change its permissions",
    ),
    errno.EPERM: (
        "the operation is not permitted",
        "Choose a directory this user can write",
    ),
    errno.ENOTDIR: (
        "a part of the path is a file, not a directory",
        "Choose another path, or move that file away",
    ),
    errno.EISDIR: ("it is a directory, not a file", "Move that directory away"),
    errno.EEXIST: (
        "a file of that name is in the way",
        "Choose another path, or move that file away",
    ),
    errno.ENOENT: ("it does not exist", "Check the path"),
    errno.EFBIG: (
        "the file would be larger than this process may write",
        "Raise the file size limit",
    ),
}


def run_directory_error(
    error: OSError, path: Path | str, *, what: str
) -> RunDirectoryError | VolumeError:
    """Make an OSError an error for the user: which path, ``what`` could not be done, why, and what helps.

    A VolumeError where the path may be fine at another moment or on another host.
    """
    # The run's author can mend a path; trouble of the volume is for another host, or a later moment.
    if error.errno in PASSING:
        return volume_error(error, path, what)
    reason, remedy = _REASONS.get(
        error.errno or 0,
        (error.strerror or type(error).__name__, "Check the path and the volume"),
    )
    return RunDirectoryError(Problem(str(path), what, reason, remedy))


@contextmanager
def reported(path: Path | str, *, what: str) -> Iterator[None]:
    """Turn an OSError inside the block into a RunDirectoryError, or a VolumeError, that names ``path``."""
    try:
        yield
    except OSError as error:
        raise run_directory_error(error, path, what=what) from error


def dumps_strict(value: Any, *, indent: int | None = None) -> str:
    """Write JSON that every parser reads: non-finite floats are null, keys keep their order, floats
    round-trip bit by bit."""
    separators = (",", ":") if indent is None else (",", ": ")
    dumps = functools.partial(
        json.dumps,
        allow_nan=False,
        indent=indent,
        separators=separators,
        ensure_ascii=False,
    )
    # Hardly any record has a number that is none: looking through all of them first would cost each line.
    try:
        return dumps(value)
    except ValueError:
        return dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def encode_text(text: str) -> bytes:
    """Encode as UTF-8; half a surrogate pair (an undecodable byte of a file name) becomes ``?``, since no
    parser would take it."""
    return text.encode("utf-8", errors="replace")


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` so that a reader, or a machine that loses power, sees the old or the new text and
    nothing between.

    Raises RunDirectoryError; the old file is then untouched and no temporary file is left.
    """
    with reported(path, what="cannot be written"):
        replace_durably(path, encode_text(text))


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in ``path``; None without such a file.

    Raises RunDirectoryError for anything else.
    """
    try:
        with reported(path, what="cannot be read"):
            text = path.read_text("utf-8")
        value = json.loads(text)
    except RunDirectoryError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
    except ValueError as error:
        raise RunDirectoryError(
            Problem(
                str(path),
                "is not valid JSON",
                str(error),
                "Restore it from a backup",
            )
        ) from error
    if not isinstance(value, dict):
        raise RunDirectoryError(
            Problem(
                str(path),
                f"holds a {type(value).__name__}, not a JSON object",
                "",
                "Restore it",
            )
        )
    return value


_BLOCK_BYTES = 1 << 20


class JsonLines:
    """The objects of a JSON-lines file, one at a time, with the 1-based number of their line.

    A last line that a kill left unfinished is no error: after the iteration ``torn_bytes`` is its length. Any
    other line that is not a JSON object raises RunDirectoryError. A missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn_bytes = 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, Any]]]:
        self.torn_bytes = 0
        with reported(self.path, what="cannot be read"):
            try:
                file = self.path.open("rb")
            except FileNotFoundError:
                return
            with file:
                first = 1
                while lines := file.readlines(_BLOCK_BYTES):
                    # A block at once is half the time; one by one only where a line in it is no object.
                    rows = _parse_objects(lines)
                    if rows is not None:
                        yield from enumerate(rows, start=first)
                        first += len(rows)
                        continue
                    for number, line in enumerate(lines, start=first):
                        value = parse_object(line)
                        if value is not None:
                            yield number, value
                        elif line.endswith(b"\n"):
                            raise self.malformed(number, "is not a JSON object")
                        else:
                            # Only the last line of the file has no newline: a kill cut it off.
                            self.torn_bytes = len(line)
                    first += len(lines)

    def malformed(self, number: int, what: str) -> RunDirectoryError:
        """Build the error for a line that cannot be used."""
        where = f"{self.path} line {number}"
        return RunDirectoryError(
            Problem(
                where,
                what,
                "",
                "Remove the line, or restore the file from a backup",
            )
        )


def _parse_objects(lines: list[bytes]) -> list[dict[str, Any]] | None:
    """Parse all lines with one call; None where some line is no object of its own.

    One call takes half the time of one a line.
    """
    if not all(line.startswith(b"{") for line in lines):
        return None
    try:
        rows = json.loads(b"[%b]" % b",".join(lines))
    except (ValueError, RecursionError):
        return None
    return (
        rows if len(rows) == len(lines) and all(type(row) is dict for row in rows) else None
    )


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Parse the JSON object in ``line``; None where it holds anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def mend_last_line(path: Path) -> int:
    """Make a JSON-lines file ready to be appended to; returns the bytes of an unfinished last line that were
    cut off.

    A kill may leave a part of a line. Appending to it would spoil the next one too. A whole object that only
    misses its newline is kept. Raises RunDirectoryError.
    """
    with reported(path, what="cannot be opened for appending"):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            return 0
        with file:
            # Backwards in blocks: the file of a long run is hundreds of megabytes.
            size, tail = file.seek(0, os.SEEK_END), b""
            while len(tail) < size:
                block = min(1 << 16, size - len(tail))
                tail = (
                    os.pread(
                        file.fileno(),
                        block,
                        size - len(tail) - block,
                    )
                    + tail
                )
                cut = tail.rfind(b"\n", 0, len(tail) - 1)
                if cut >= 0:
                    tail = tail[cut + 1 :]
                    break
            # A whole object lacks nothing but its newline; anything else would spoil the line after it.
            if not tail or tail.endswith(b"\n"):
                return 0
            if parse_object(tail) is not None:
                file.write(b"\n")
                return 0
            file.truncate(size - len(tail))
            return len(tail)


@dataclass(frozen=True)
class StopRequest:
    """A stop file that was found.

    ``time``: when it was made, Unix seconds. ``note``: the first line of its text.
    """

    time: float
    note: str


class RunDirectory:
    """Paths and small files of one run's directory. Making the object touches nothing."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.resolved = self.path / RunFile.RESOLVED
        self.provenance = self.path / RunFile.PROVENANCE
        self.requested = self.path / RunFile.REQUESTED
        self.preflight = self.path / RunFile.PREFLIGHT
        self.metrics = self.path / RunFile.METRICS
        self.events = self.path / RunFile.EVENTS
        self.evaluation = self.path / RunFile.EVALUATION
        self.evaluations = self.path / RunFile.EVALUATIONS
        self.checkpoints = self.path / RunFile.CHECKPOINTS
        self.exports = self.path / RunFile.EXPORTS
        self.logs = self.path / RunFile.LOGS
        self.compiled = self.path / RunFile.COMPILED
        self.profiles = self.path / RunFile.PROFILES
        self.trackers = self.path / RunFile.TRACKERS
        self.report_html = self.path / RunFile.REPORT_HTML
        self.report_markdown = self.path / RunFile.REPORT_MARKDOWN
        self.summary = self.path / RunFile.SUMMARY
        self.complete = self.path / RunFile.COMPLETE
        self.stop = self.path / RunFile.STOP

    def create(self) -> None:
        """Make the directory and its folders, or find them; prove that a file can be written.

        Raises RunDirectoryError.
        """
        # Several nodes may do this at once: each step may find its work done.
        for folder in (self.path, self.checkpoints, self.logs):
            with reported(folder, what="cannot be created"):
                folder.mkdir(parents=True, exist_ok=True)
        # Written, not only asked for: permissions, quotas and read-only mounts show only then.
        probe = self.path / f".probe.{unique_suffix()}"
        with reported(self.path, what="cannot be written to"):
            try:
                with probe.open("wb") as file:
                    file.write(b"probe\n")
                    file.flush()
                    os.fsync(file.fileno())
            finally:
                with suppress(OSError):
                    probe.unlink()

    def require_run(self) -> None:
        """Raise RunDirectoryError unless this is the directory of a run that has begun."""
        problem = Problem(
            str(self.path),
            "is not a run directory",
            "",
            "Name the directory that 'evergrad run' wrote",
        )
        if not self.path.exists():
            raise RunDirectoryError(
                Problem(str(self.path), "does not exist", "", problem.remedy)
            )
        if not self.path.is_dir():
            raise RunDirectoryError(
                Problem(
                    str(self.path),
                    "is a file, not a run directory",
                    "",
                    problem.remedy,
                )
            )
        if not any(file.exists() for file in (self.resolved, self.metrics, self.events)):
            why = (
                f"it has none of {RunFile.RESOLVED}, {RunFile.METRICS} and {RunFile.EVENTS}"
            )
            raise RunDirectoryError(
                Problem(
                    problem.path,
                    problem.what,
                    why,
                    problem.remedy,
                )
            )

    def read_resolved(self) -> dict[str, Any] | None:
        """Read the resolved configuration; None before the first start. Raises RunDirectoryError."""
        return read_json_object(self.resolved)

    def write_resolved(self, resolved: dict[str, Any]) -> None:
        """Replace the resolved configuration. Raises RunDirectoryError."""
        write_atomically(self.resolved, dumps_strict(resolved, indent=2) + "\n")

    def is_complete(self) -> bool:
        """Whether the run has reached its horizon."""
        return self.complete.exists()

    def read_complete(self) -> dict[str, Any] | None:
        """Read the values that ``mark_complete`` wrote, or None. Raises RunDirectoryError."""
        return read_json_object(self.complete)

    def mark_complete(self, facts: dict[str, Any]) -> None:
        """Record that the run has reached its horizon. Raises RunDirectoryError."""
        write_atomically(self.complete, dumps_strict(facts, indent=2) + "\n")

    def unmark_complete(self) -> None:
        """Take the mark away, for a run whose horizon grew. Raises RunDirectoryError."""
        with reported(self.complete, what="cannot be removed"):
            self.complete.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        """Whether somebody made the stop file. Costs one ``stat``; a volume that is away has none for now."""
        return os.path.exists(self.stop)

    def consume_stop_file(self) -> StopRequest | None:
        """Remove the stop file and return what it said, or None without one. Raises RunDirectoryError."""
        with reported(self.stop, what="cannot be removed"):
            # Read before it is removed: what it says goes into the run's events.
            try:
                made = self.stop.stat().st_mtime
                with self.stop.open("rb") as file:
                    lines = file.read(1000).decode("utf-8", errors="replace").splitlines()
                self.stop.unlink()
            except FileNotFoundError:
                return None
            return StopRequest(time=made, note=lines[0].strip() if lines else "")


def searched_folders(path: Path) -> tuple[Path, ...]:
    """The folders that ``run.json`` of a run that ``path`` belongs to is looked for in."""
    return (path, *path.absolute().parents[:2])


def find_record(path: Path) -> tuple[RunDirectory, dict[str, Any]] | None:
    """The run that ``path`` belongs to, with its ``run.json``; None where it belongs to none.

    ``path``: its directory, the folder of its checkpoints, or one of them. Raises RunDirectoryError or
    VolumeError.
    """
    for folder in searched_folders(path):
        directory = RunDirectory(folder)
        if (record := directory.read_resolved()) is not None:
            return directory, record
    return None
