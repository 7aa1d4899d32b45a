"""Starts and ends a node's ``beat`` process: a node that is slow, since it imports, forks or waits for disks,
is not silent."""

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
"""Pause before a new start: what has ended the process may end it again at once."""


class Heartbeat:
    """One process beside a node's own, in its process group."""

    def __init__(self, host: str, port: int, beat: Beat) -> None:
        self._order = {"host": host, "port": port, "beat": json.loads(encode(beat))}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process, while there is one."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it. Raises OSError where no process can be started."""
        # Its order, with the token, comes by its input: others can read arguments and variables.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",  # it keeps no volume busy
        )
        # One that has ended already is replaced by ``keep``.
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None  # noqa: S101 - a pipe was asked for
            self._process.stdin.write(json.dumps(self._order).encode("ascii") + b"\n")
            self._process.stdin.flush()

    async def keep(self) -> None:
        """Start it anew whenever it has ended, for example because memory was short; until cancelled."""
        while True:
            await asyncio.sleep(_RESTART_SECONDS)
            process = self._process
            # Where memory is short the new start fails as well, and is tried again after the next pause.
            if process is not None and process.poll() is not None:
                self._forget(process)
                with contextlib.suppress(OSError):
                    self.start()

    def close(self) -> None:
        """End it."""
        process, self._process = self._process, None
        if process is None:
            return
        # Killed, and not left to its end of input: workers that this process has forked may hold that open.
        self._forget(process)
        process.kill()
        process.wait()

    def _forget(self, process: "subprocess.Popen[bytes]") -> None:
        if process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
