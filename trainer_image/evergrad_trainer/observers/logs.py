"""A log file for each rank; on the terminal only rank 0's warnings and errors."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from evergrad_trainer.base.bounded_file import BoundedFile
from evergrad_trainer.base.records import EvaluationRecord, Event, RunInfo, record_row
from evergrad_trainer.base.redact_sequences import hide_bases
from evergrad_trainer.observers.base import BaseObserver
from evergrad_trainer.observers.events import event_row
from evergrad_trainer.run.directory import RunDirectory, dumps_strict, reported

_log = logging.getLogger(__name__)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current ``sys.stderr``, which is the progress bar's own stream while the bar is shown."""

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, value: TextIO) -> None:
        pass


class _FileHandler(logging.Handler):
    """Appends to a file of bounded size, and drops records that the volume refuses."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError."""
        super().__init__()
        self._file = BoundedFile(path)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = f"{self.format(record)}\n"
            self._file.write(text.encode("utf-8", errors="backslashreplace"))
        except Exception:  # noqa: BLE001 - as all handlers do: a record that cannot be formatted
            self.handleError(record)

    def close(self) -> None:
        self._file.close()
        super().close()


@dataclass(frozen=True)
class Logs:
    """The handlers that ``setup_logging`` has installed."""

    handlers: tuple[logging.Handler, ...]
    previous_level: int

    def close(self) -> None:
        """Remove the handlers, and close the file."""
        root = logging.getLogger()
        for handler in self.handlers:
            root.removeHandler(handler)
            handler.close()
        root.setLevel(self.previous_level)
        logging.captureWarnings(False)


def setup_logging(
    directory: RunDirectory,
    *,
    rank: int,
    node: int = 0,
    level: int = logging.INFO,
    on_terminal: bool | None = None,
) -> Logs:
    """Log to ``logs/node-<node>-rank-<rank>.log`` (appending), and warnings to stderr if ``on_terminal``.

    By default, only rank 0 logs to stderr. Raises RunDirectoryError if the file cannot be opened.
    """
    path = directory.logs / f"node-{node}-rank-{rank}.log"
    with reported(path, what="cannot be opened for appending"):
        file = _FileHandler(path)
    prefix = f"%(asctime)s.%(msecs)03d node {node} rank {rank} %(levelname)s %(name)s: %(message)s"
    file.setFormatter(_FileFormatter(prefix, datefmt="%Y-%m-%dT%H:%M:%S"))
    handlers: list[logging.Handler] = [file]
    # Only one rank writes to the terminal: otherwise the same warning would be repeated for each rank.
    if rank == 0 if on_terminal is None else on_terminal:
        terminal = _StderrHandler()
        terminal.setLevel(logging.WARNING)
        terminal.setFormatter(_TerminalFormatter())
        handlers.append(terminal)
    root = logging.getLogger()
    logs = Logs(handlers=tuple(handlers), previous_level=root.level)
    root.setLevel(level)
    for handler in handlers:
        root.addHandler(handler)
    # Write warnings of libraries to the log, instead of across the progress bar.
    logging.captureWarnings(True)
    return logs


class _FileFormatter(logging.Formatter):
    """Formatter that hides sequences of bases, which errors and tracebacks of libraries may quote."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_bases(super().format(record))


class _TerminalFormatter(logging.Formatter):
    """Formatter to ``warning: message``; tracebacks stay in the file."""

    def format(self, record: logging.LogRecord) -> str:
        return hide_bases(f"{record.levelname.lower()}: {record.getMessage().rstrip()}")


class EventLog(BaseObserver):
    """Observer that writes the run's transitions into rank 0's log, so that the log is complete by itself."""

    def run_start(self, info: RunInfo) -> None:
        _log.info("run %s", dumps_strict(info.__dict__))

    def evaluation_end(self, record: EvaluationRecord) -> None:
        _log.info("evaluation %s", dumps_strict(record_row(record)))

    def event(self, event: Event) -> None:
        _log.info("event %s", dumps_strict(event_row(event)))
