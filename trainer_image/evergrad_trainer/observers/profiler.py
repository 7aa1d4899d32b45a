"""Records traces of scheduled steps with torch's profiler, in files of the run directory."""

import logging
import os
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from evergrad_manifest.training import Profile
from evergrad_trainer.base import torch_private
from evergrad_trainer.base.records import RunInfo, StepRecord
from evergrad_trainer.observers.base import BaseObserver

_log = logging.getLogger(__name__)

WRITING_SECONDS: Final = 10.0
"""Maximum time that the end of a process waits for its last trace."""
PARTIAL_SECONDS: Final = 3600.0
"""Age after which an unfinished file counts as abandoned, because writing a trace takes only seconds."""
_FILE: Final = re.compile(r"step-(\d+)\.")
_PARTIAL: Final = ".partial.json.gz"


class Trace(Protocol):
    """The interface of one recording of torch's profiler."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def export_chrome_trace(self, path: str) -> None: ...


def begin_trace(settings: Profile) -> Trace:
    """Begin a recording of the host and, if there is one, of the accelerator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_initialized():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile: Any = torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=settings.memory
    )
    return profile  # type: ignore[no-any-return]


class Profiler(BaseObserver):
    """Traces steps by their numbers, so that every process of a run traces the same steps."""

    def __init__(
        self,
        settings: Profile,
        folder: Path,
        *,
        begin: Callable[[Profile], Trace] = begin_trace,
    ) -> None:
        self._settings = settings
        self._folder = folder
        self._begin = begin
        self._trace: Trace | None = None
        self._first = 0
        self._left = 0
        self._writing: threading.Thread | None = None

    def run_start(self, info: RunInfo) -> None:
        # When rank 0 starts or resumes, its next step may be the first step of a trace.
        if self._trace is None and is_first(self._settings, info.start_step + 1):
            self._start(info.start_step + 1)

    def step_end(self, record: StepRecord) -> None:
        if self._trace is not None:
            self._left -= 1
            if self._left <= 0:
                self._end()
        if self._trace is None and is_first(self._settings, record.step + 1):
            self._start(record.step + 1)

    def close(self) -> None:
        if self._trace is not None and self._left < self._settings.steps:
            # The run ends during the trace. Keep the steps that are traced.
            self._end()
        elif self._trace is not None:
            # Without a complete step there is no trace. The memory snapshot is still written, because it
            # helps after a step that ran out of memory.
            self._trace.stop()
            self._trace = None
            self._dump_memory()
        if self._writing is not None:
            self._writing.join(WRITING_SECONDS)

    def _start(self, step: int) -> None:
        if self._writing is not None and self._writing.is_alive():
            # The volume is slow: skip this trace instead of delaying a step.
            _log.warning("no trace of step %d: the one before is still being written", step)
            return
        self._trace = self._begin(self._settings)
        self._first, self._left = step, self._settings.steps
        if self._settings.memory and torch.cuda.is_initialized():
            torch_private.record_memory(self._settings.max_entries)
        self._trace.start()

    def _end(self) -> None:
        trace, self._trace = self._trace, None
        if trace is None:
            return
        trace.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = self._file_name()
        self._dump_memory()
        wanted, traced = self._settings.steps, self._settings.steps - self._left

        def write() -> None:
            try:
                path = self._folder / f"{name}.trace.json.gz"
                partial = path.with_name(f".{name}{_PARTIAL}")
                trace.export_chrome_trace(str(partial))
                partial.replace(path)
                if traced == wanted:
                    _log.info("traced %d steps: %s", traced, path)
                else:
                    _log.warning(
                        "traced %d of %d steps, because the process stopped: %s",
                        traced,
                        wanted,
                        path,
                    )
                prune(self._folder, keep=self._settings.keep)
            except Exception as error:  # noqa: BLE001 - a failed trace must not stop the training
                kind = type(error).__name__
                _log.warning("the trace %s cannot be written: %s: %s", name, kind, error)

        # Write in a thread, because writing a long trace takes seconds.
        self._writing = threading.Thread(target=write, name="evergrad-trace", daemon=True)
        self._writing.start()

    def _file_name(self) -> str:
        return f"step-{self._first}.{socket.gethostname()}.{os.getpid()}"

    def _dump_memory(self) -> None:
        """Write the snapshot of the device's memory, if it is enabled, and stop recording."""
        if not (self._settings.memory and torch.cuda.is_initialized()):
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        torch_private.dump_memory(str(self._folder / f"{self._file_name()}.memory.pickle"))
        torch_private.record_memory(None)


def is_first(settings: Profile, step: int) -> bool:
    """Whether a trace begins with ``step``."""
    after = step - settings.first_step
    if settings.every is None:
        return after == 0
    return after >= 0 and after % settings.every == 0


def prune(folder: Path, *, keep: int) -> None:
    """Remove all traces except those of the ``keep`` steps that were written last by any process, and remove
    unfinished files that a kill left."""
    found: dict[int, list[Path]] = {}
    times: dict[int, float] = {}
    partial: list[tuple[float, Path]] = []
    for path in folder.iterdir():
        match = _FILE.match(path.name)
        if match is None and not path.name.endswith(_PARTIAL):
            continue
        try:
            written = path.stat().st_mtime
        except FileNotFoundError:
            # Another process has removed it.
            continue
        if match is None:
            partial.append((written, path))
            continue
        step = int(match[1])
        found.setdefault(step, []).append(path)
        times[step] = max(written, times.get(step, written))

    # Sort by time, because a run that went back may write its newest trace for a lower step.
    newest_first = sorted(found, key=lambda step: (times[step], step), reverse=True)
    removed = [path for step in newest_first[keep:] for path in found[step]]
    # Compare only times of the volume's clock, because hosts have different clocks and a process on a lost
    # host cannot be checked.
    now = max(times.values(), default=0.0)
    removed += [path for written, path in partial if now - written > PARTIAL_SECONDS]
    for path in removed:
        path.unlink(missing_ok=True)
