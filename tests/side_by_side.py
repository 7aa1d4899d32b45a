"""Runs two commands at once: the tests on a cluster, which mostly wait, and behind them those of units and
processes, which mostly compute.

``python tests/side_by_side.py --front 'make test-e2e' --behind 'python -m pytest tests/unit'``: what the
front says is shown as it comes; the other's words follow once the front has ended, and until then one line a
minute says how far it is. Fails if either fails. Ctrl-C, SIGTERM and SIGHUP end both, each with its own
clean-up.
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
"""What a line begins with that pytest, and tests/conftest.py, write for a test that has failed."""
_SECONDS_TO_CLEAN_UP = 120.0
"""Time for fixtures to take down what they started, such as a cluster."""
_NICENESS = 5
"""Niceness of the command behind: the cluster's nodes, whose tests have time limits, are served first."""


def run(front: Sequence[str], behind: Sequence[str]) -> int:
    """Run both to their ends; returns 0 if both succeed, else 1."""
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
            # Also after an interrupt: what has failed until then may be why there was one.
            _show(said)
    for name, process in (("front", first), ("behind", second)):
        if process.returncode != 0:
            print(f"{name}: failed with exit code {process.returncode}", file=sys.stderr)
    return 0 if first.returncode == second.returncode == 0 else 1


def _start(
    command: Sequence[str], *, output: int | None = None
) -> "subprocess.Popen[bytes]":
    # A process group of its own: a signal reaches all of it, and a Ctrl-C reaches it through us alone.
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
    """Until the front has ended; says once a minute how far the other is, and which tests of it have failed."""
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
    """Print what the command behind has said since the last call."""
    while part := said.read(1 << 16):
        sys.stdout.buffer.write(part)
    sys.stdout.buffer.flush()


def _end(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Interrupt the commands that still run, all at once, and kill those that this does not end."""
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
    # Also where it is ignored, as a shell has it for what runs in the background: the commands would ignore it
    # as well, and could not be told to clean up.
    signal.signal(signal.SIGINT, _raise)
    # A terminal that is closed says so to this process group alone. Under nohup that stays ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _raise)
    try:
        return run(options.front, options.behind)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
