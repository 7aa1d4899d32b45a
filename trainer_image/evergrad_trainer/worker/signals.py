"""SIGTERM and SIGINT set a flag on which the ranks agree at a step boundary. A second signal ends the process
immediately."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Literal

from evergrad_common.contract import ExitCode, step_of_checkpoint

_log = logging.getLogger(__name__)
_SAME_SECONDS = 1.0
"""A SIGTERM within this time repeats the first request: ``timeout`` signals the process and then its whole
group."""


class StopCount:
    """Distinguishes a first request to stop from a second request, and from a repetition of the first."""

    def __init__(self) -> None:
        self.first_at: float | None = None

    def note(
        self,
        number: int,
        *,
        now: float,
    ) -> Literal["first", "same", "second"]:
        """Classify a SIGTERM or SIGINT that arrived at the monotonic time ``now``."""
        if self.first_at is None:
            self.first_at = now
            return "first"
        return (
            "same"
            if number == signal.SIGTERM and now - self.first_at < _SAME_SECONDS
            else "second"
        )


def describe_abrupt_end(checkpoints: Path | None) -> str:
    """Describe which steps a second request to stop loses, and where the run resumes.

    ``checkpoints``: directory of the run's checkpoints; None for a process that saves none.
    """
    said = (
        "interrupted twice: leaving at once, state since the last checkpoint is not saved"
    )
    if checkpoints is None:
        return said
    # Read only the names: this process has no time to validate files; the next start validates them.
    names = [one.name for one in checkpoints.iterdir()] if checkpoints.is_dir() else []
    steps = [step for step in map(step_of_checkpoint, names) if step is not None]
    if not steps:
        return f"{said}. There is no checkpoint: the same command starts again at step 1"
    return f"{said}. The newest checkpoint is of step {max(steps)}: the same command resumes there"


class StopSignals:
    """Catches SIGTERM and SIGINT while it is installed. Use it only in the main thread.

    ``checkpoints``: directory of the run's checkpoints, for the message when a second signal ends the
    process.

    Python runs signal handlers only when the main thread is in the interpreter, which a rank inside a
    collective is not. A thread therefore reads the signal numbers from the wake-up pipe when they arrive.
    """

    def __init__(self, checkpoints: Path | None = None) -> None:
        self._checkpoints = checkpoints
        self._requested = threading.Event()
        self._count = StopCount()
        self._read_fd, self._write_fd = os.pipe()
        os.set_blocking(self._write_fd, False)
        self._previous: dict[signal.Signals, object] = {}
        self._previous_wakeup = -1

    def install(self) -> None:
        """Start to catch the signals."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._previous[number] = signal.signal(number, lambda *_: None)
        self._previous_wakeup = signal.set_wakeup_fd(
            self._write_fd, warn_on_full_buffer=False
        )
        threading.Thread(target=self._listen, name="evergrad-signals", daemon=True).start()

    def uninstall(self) -> None:
        """Restore the previous handlers."""
        # Restore the pipe first, so that no number is written to it after its reader has ended.
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.write(self._write_fd, b"\0")

    @property
    def is_requested(self) -> bool:
        """Return whether this process was requested to stop."""
        return self._requested.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait until this process is requested to stop, or until ``seconds`` have passed; return whether it
        was."""
        return self._requested.wait(seconds)

    def _listen(self) -> None:
        while True:
            for number in os.read(self._read_fd, 64):
                # No signal has the number 0; ``uninstall`` writes a 0.
                if number == 0:
                    return
                if number not in (signal.SIGTERM, signal.SIGINT):
                    continue
                self._requested.set()
                if self._count.note(number, now=time.monotonic()) == "second":
                    # A second request means: do not wait for the save.
                    os.write(2, f"{describe_abrupt_end(self._checkpoints)}\n".encode())
                    os._exit(ExitCode.STOPPED_UNSAVED)
