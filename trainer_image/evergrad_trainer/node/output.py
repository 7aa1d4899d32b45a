"""The output of workers: into a file each, and on, with the rank in front, to the node's own stderr."""

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
    """Reads one worker's pipe to its end. ``rank`` is asked for each line: it changes with the group."""

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
        """Must be made inside a running event loop.

        A file that cannot be opened is done without, since training can be.
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
        """The worker's last lines: the frames of an error that was reported in no other way."""
        os.set_blocking(descriptor, False)
        asyncio.get_running_loop().add_reader(descriptor, self.drain)

    def drain(self) -> None:
        """Take what is there. Called by the loop, and once more when the worker has ended."""
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
            # The file is a convenience: a full volume must not end training.
            if self._file is not None:
                self._file.write(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._show(line)
            # A line without an end would grow for ever.
            if len(self._rest) > _LONGEST_LINE:
                self._show(self._rest)
                self._rest = b""

    def close(self) -> None:
        """Close pipe and file, once everything is read."""
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
            # Nobody may read this node's stderr any more, which is no reason to end.
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.write(f"[{where}] {text}\n")
                sys.stderr.flush()
