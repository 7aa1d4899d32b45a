"""Starts and ends a node's helper process, which sends beats to the coordinator.

Without the beats, a node would count as silent while it imports modules, forks or waits for a disk.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

from evergrad_common.codec import encode
from evergrad_coordinator.protocol import Beat

_PROGRAM = Path(__file__).with_name("heartbeat_sender.py")
_RESTART_SECONDS = 1.0
"""Seconds before a restart, because the same cause may end the process again immediately."""


class Heartbeat:
    """The helper process of a node, in the node's process group."""

    def __init__(self, host: str, port: int, beat: Beat) -> None:
        self._order = {"host": host, "port": port, "beat": json.loads(encode(beat))}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The pid of the process, or None if it has not been started or was closed."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process. Raises OSError if it cannot be started."""
        # Pass the order, which contains the token, through standard input: other processes can read arguments
        # and environment variables.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # so that the process does not keep a volume busy
        )
        # If the process has already ended, ``keep`` replaces it.
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
            self._process.stdin.write(json.dumps(self._order).encode("ascii") + b"\n")
            self._process.stdin.flush()

    async def keep(self) -> None:
        """Restart the process whenever it has ended, for example because memory was short. Never returns."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            process = self._process
            # If the start fails, for example because memory is short, retry after the next pause.
            if process is not None and process.poll() is not None:
                self._forget(process)
                with contextlib.suppress(OSError):
                    self.start()

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        # Kill it instead of relying on the end of its input, which forked workers may keep open.
        self._forget(process)
        process.kill()
        process.wait()

    def _forget(self, process: "subprocess.Popen[bytes]") -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
