"""Runs two commands at the same time: the cluster tests in front, which mostly wait, and the unit and process
tests behind them, which mostly compute.

``python tests/side_by_side.py --front 'make test-e2e' --behind 'python -m pytest tests/unit'``: the
output of the front command is shown immediately. The output of the command behind is shown after the front
command has ended; until then, one line a minute shows its progress. The exit code is 1 if either command
fails. Ctrl-C, SIGTERM and SIGHUP end both commands, and each command runs its own clean-up.
"""

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

_SECONDS_BETWEEN_LINES = 60.0
_FAILED = "FAILED "
"""Prefix of the line that pytest and tests/conftest.py print for a failed test."""
_SECONDS_TO_CLEAN_UP = 120.0
"""Time for fixtures to stop the processes that they started, such as a cluster."""
_NICENESS = 5
"""Niceness of the command behind. The cluster tests have time limits, so their nodes get the CPU first."""


def run(front: Sequence[str], behind: Sequence[str]) -> int:
    """Run both commands until they end, and return 0 if both succeed, else 1."""
    with (
        tempfile.TemporaryFile() as words,
        open(f"/proc/self/fd/{words.fileno()}", "rb") as said,
    ):
        processes = [_start(["nice", "-n", str(_NICENESS), *behind], output=words.fileno())]
        try:
            processes.insert(0, _start(front))
            first, second = processes
            _wait(first, second, words.fileno())
            while second.poll() is None:
                _show(said)
                time.sleep(0.5)
        finally:
            _end(processes)
            # Show the output after an interrupt too: a failed test may be the reason for the interrupt.
            _show(said)
    for name, process in (("front", first), ("behind", second)):
        if process.returncode != 0:
            print(f"{name}: failed with exit code {process.returncode}", file=sys.stderr)
    return 0 if first.returncode == second.returncode == 0 else 1


def _start(
    command: Sequence[str], *, output: int | None = None
) -> "subprocess.Popen[bytes]":
    # Use a new process group, so that a signal reaches all its processes, and so that only this process
    # forwards Ctrl-C.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output and subprocess.STDOUT,
        process_group=0,
    )


def _wait(
    first: "subprocess.Popen[bytes]", second: "subprocess.Popen[bytes]", words: int
) -> None:
    """Wait until the front command ends. Each minute, print the progress and failures of the other."""
    begin = 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            first.wait(timeout=_SECONDS_BETWEEN_LINES)
            return
        size = os.fstat(words).st_size
        whole, _, _ = os.pread(words, size - begin, begin).rpartition(b"\n")
        begin += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith(_FAILED):
                print(f"{time.strftime('%T')}  behind: {line}", flush=True)
        said = os.pread(words, 400, max(0, size - 400)).decode(errors="replace")
        last = said.strip().rpartition("\n")[2][-100:]
        state = "ended" if second.poll() is not None else "is at"
        print(f"{time.strftime('%T')}  behind: {state}: {last}", flush=True)


def _show(said: BinaryIO) -> None:
    """Print the output of the command behind since the last call."""
    while part := said.read(1 << 16):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Interrupt all running commands, then kill each command that has not ended after the clean-up time."""
    running = [one for one in processes if one.poll() is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
    until = time.monotonic() + _SECONDS_TO_CLEAN_UP
    for process in running:
        try:
            process.wait(timeout=max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _raise(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Read the two commands and run them."""
    parser = argparse.ArgumentParser(description=Path(__file__).name)
    parser.add_argument("--front", required=True, type=shlex.split)
    parser.add_argument("--behind", required=True, type=shlex.split)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _raise)
    # A shell ignores SIGINT for background jobs, and child processes inherit this. Install the handler
    # anyway; otherwise the commands would ignore SIGINT and could not clean up.
    signal.signal(signal.SIGINT, _raise)
    # A closed terminal sends SIGHUP to this process group only. Keep ignoring SIGHUP under nohup.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise)
    try:
        return run(options.front, options.behind)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
