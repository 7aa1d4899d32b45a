"""Copies the output of each worker to a file and, with the rank in front, to the node's own stderr."""

import asyncio
import contextlib
import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from evergrad_trainer.base.bounded_file import BoundedFile

_log = logging.getLogger(__name__)
_BLOCK = 1 << 16
_LONGEST_LINE = 1 << 16
_LAST_LINES = 40


class WorkerOutput:
    """Reads one worker's pipe to its end. ``rank`` is called for each line, because it changes with the
    group."""

    def __init__(
        self,
        descriptor: int,
        *,
        path: Path,
        node: str,
        rank: Callable[[], int],
        is_forwarded: bool,
        on_output: Callable[[], None],
    ) -> None:
        """Create this inside a running event loop.

        If the file cannot be opened, the output is not saved, but training continues.
        """
        self._file: BoundedFile | None = None
        try:
            self._file = BoundedFile(path)
        except OSError as error:
            _log.warning("what a worker prints goes into no file; %s", error)
        self._descriptor = descriptor
        self._node = node
        self._rank = rank
        self._is_forwarded = is_forwarded
        self._on_output = on_output
        self._rest = b""
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        """The worker's last lines, which show the traceback of an error that the worker did not report."""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self.drain)

    def drain(self) -> None:
        """Read the available output. The event loop calls this, and it is called once more after the worker
        ended."""
        while self._descriptor >= 0:
            try:
                data = os.read(self._descriptor, _BLOCK)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            self._on_output()
            # The file is optional: a full volume must not end training.
            if self._file is not None:
                self._file.write(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._show(line)
            # Split a line without an end, because it would grow forever.
            if len(self._rest) > _LONGEST_LINE:
                self._show(self._rest)
                self._rest = b""

    def close(self) -> None:
        """Close pipe and file after everything is read."""
        if self._descriptor < 0:
            return
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = -1
        if self._rest:
            self._show(self._rest)
        if self._file is not None:
            self._file.close()

    def _show(self, line: bytes) -> None:
        text = line.decode("utf-8", errors="replace")
        self.last_lines.append(text)
        if self._is_forwarded:
            rank = self._rank()
            where = f"node {self._node} rank {rank}" if rank >= 0 else f"node {self._node}"
            # This node's stderr may have no reader any more, which must not end the node.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"[{where}] {text}\n")
                sys.stderr.flush()
