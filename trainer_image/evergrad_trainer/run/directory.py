"""The run directory on disk: its layout, strict JSON, atomic writes of small files, and JSON-lines files that
survive a kill."""

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
    """Convert an OSError to an error for the user, with the path, ``what`` failed, the reason and a remedy.

    Returns a VolumeError if the path may work later or on another host.
    """
    # The user can correct a path. A failure of the volume needs a retry, later or on another host.
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
    """Encode ``value`` as JSON that every parser can read.

    Non-finite floats become null, keys keep their order, and floats round-trip bit by bit.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    dumps = functools.partial(
        json.dumps,
        allow_nan=False,
        indent=indent,
        separators=separators,
        ensure_ascii=False,
    )
    # Non-finite numbers are rare. To search each record for them first would slow down every line.
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
    """Encode as UTF-8. A lone surrogate (an undecodable byte of a file name) becomes ``?``, because no parser
    accepts it."""
    return text.encode("utf-8", errors="replace")


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` atomically: readers find either the old or the new text, also after a loss of power.

    Raises RunDirectoryError if the file cannot be written. The old file is then unchanged, and no temporary
    file remains.
    """
    with reported(path, what="cannot be written"):
        replace_durably(path, encode_text(text))


def read_json_object(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in ``path``; returns None if the file does not exist.

    Raises RunDirectoryError if the file cannot be read or is not a JSON object.
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
    """Iterator over the objects of a JSON-lines file, each with the 1-based number of its line.

    If a kill left the last line unfinished, the iteration ends without an error, and ``torn_bytes`` is the
    length of that line. Raises RunDirectoryError if any other line is not a JSON object. A missing file
    counts as empty.
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
                    # To parse a whole block takes half the time. Parse line by line only if that fails.
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
                            # Only the last line can lack a newline; a kill interrupted its write.
                            self.torn_bytes = len(line)
                    first += len(lines)

    def malformed(self, number: int, what: str) -> RunDirectoryError:
        """Build the error for an invalid line."""
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
    """Parse all lines with one call; returns None if a line is not exactly one object.

    One call for all lines takes half the time of one call for each line.
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
    """Parse the JSON object in ``line``; returns None if the line is not a JSON object."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def mend_last_line(path: Path) -> int:
    """Prepare a JSON-lines file for appending; returns the number of bytes removed from an unfinished line.

    A kill may leave a part of a line, and a line appended to it would be invalid too. If the last line is a
    whole object without a newline, the object is kept. Raises RunDirectoryError if the file cannot be opened.
    """
    with reported(path, what="cannot be opened for appending"):
        try:
            file = path.open("r+b")
        except FileNotFoundError:
            return 0
        with file:
            # Read backwards in blocks, because the file of a long run has hundreds of megabytes.
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
            # Complete a whole object with its newline; remove anything else.
            if not tail or tail.endswith(b"\n"):
                return 0
            if parse_object(tail) is not None:
                file.write(b"\n")
                return 0
            file.truncate(size - len(tail))
            return len(tail)


@dataclass(frozen=True)
class StopRequest:
    """The content of a stop file.

    ``time``: modification time of the file, Unix seconds. ``note``: the first line of its text.
    """

    time: float
    note: str


class RunDirectory:
    """Paths and small files of one run's directory. The constructor does not access the disk."""

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
        """Create the directory and its folders if they do not exist, and verify that a file can be written.

        Raises RunDirectoryError if a folder cannot be created or written to.
        """
        # Several nodes may do this at the same time, so any of the folders may exist already.
        for folder in (self.path, self.checkpoints, self.logs):
            with reported(folder, what="cannot be created"):
                folder.mkdir(parents=True, exist_ok=True)
        # Write a file: permissions, quotas and read-only mounts cause errors only on a write.
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
        """Raise RunDirectoryError if this is not the directory of a run that has begun."""
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
        """Read the resolved configuration; None before the first start.

        Raises RunDirectoryError if the file is damaged or cannot be read.
        """
        return read_json_object(self.resolved)

    def write_resolved(self, resolved: dict[str, Any]) -> None:
        """Replace the resolved configuration. Raises RunDirectoryError if it cannot be written."""
        write_atomically(self.resolved, dumps_strict(resolved, indent=2) + "\n")

    def is_complete(self) -> bool:
        """Whether the run has reached its horizon."""
        return self.complete.exists()

    def read_complete(self) -> dict[str, Any] | None:
        """Read the values that ``mark_complete`` wrote; None if the run is not complete.

        Raises RunDirectoryError if the file is damaged or cannot be read.
        """
        return read_json_object(self.complete)

    def mark_complete(self, facts: dict[str, Any]) -> None:
        """Record that the run has reached its horizon. Raises RunDirectoryError if it cannot be written."""
        write_atomically(self.complete, dumps_strict(facts, indent=2) + "\n")

    def unmark_complete(self) -> None:
        """Remove the mark, for a run that is extended. Raises RunDirectoryError if it cannot be removed."""
        with reported(self.complete, what="cannot be removed"):
            self.complete.unlink(missing_ok=True)

    def stop_requested(self) -> bool:
        """Whether the stop file exists. Costs one ``stat`` call; False while the volume is unreachable."""
        return os.path.exists(self.stop)

    def consume_stop_file(self) -> StopRequest | None:
        """Remove the stop file and return its content, or None if it does not exist.

        Raises RunDirectoryError if the file cannot be removed.
        """
        with reported(self.stop, what="cannot be removed"):
            # Read the file before it is removed: its text is recorded in the run's events.
            try:
                made = self.stop.stat().st_mtime
                with self.stop.open("rb") as file:
                    lines = file.read(1000).decode("utf-8", errors="replace").splitlines()
                self.stop.unlink()
            except FileNotFoundError:
                return None
            return StopRequest(time=made, note=lines[0].strip() if lines else "")


def searched_folders(path: Path) -> tuple[Path, ...]:
    """Return the folders in which to search for the ``run.json`` of the run that contains ``path``."""
    return (path, *path.absolute().parents[:2])


def find_record(path: Path) -> tuple[RunDirectory, dict[str, Any]] | None:
    """Find the run that contains ``path``; returns its directory and ``run.json``, or None.

    ``path``: the run directory, its folder of checkpoints, or one checkpoint. Raises RunDirectoryError if a
    ``run.json`` is damaged, or VolumeError if the volume fails.
    """
    for folder in searched_folders(path):
        directory = RunDirectory(folder)
        if (record := directory.read_resolved()) is not None:
            return directory, record
    return None
