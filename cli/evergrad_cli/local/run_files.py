"""Reads a run directory for the run's page: the history of the run, from files that grow while the run
trains."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from evergrad_common.causes import REQUESTED_ENDINGS, describe_ending
from evergrad_common.contract import RunFile, step_of_checkpoint
from evergrad_common.metrics import SHOWN, Throughput
from evergrad_common.stale_records import Beginnings, InTime
from evergrad_common.text import duration
from evergrad_coordinator.rules.downsampled_series import Track
from evergrad_coordinator.rules.history import MOST_CHECKPOINTS, RunHistory
from evergrad_coordinator.rules.state import MOST_SETS

_MOST_BYTES: Final = 64 * 1024 * 1024
"""Bytes of a file that one call of ``look`` reads; the next call reads the rest."""
_HEAD_BYTES: Final = 4096
"""Bytes at the beginning of a file that are compared to detect that the file was replaced. Its lines contain
times, so two files differ."""
_TEXTS: Final[Mapping[str, str]] = {
    "start": "a process started with {world_size} processes in all",
    "world": "training continues with {world_size} processes: {cause}",
    "save_failed": "a save failed: {reason}",
    "warning": "{message}",
    "alert": "{message}",
    "skipped": "{message}",
    "non_finite": "{message}",
    "failed": "it failed: {message}",
    "stop": "it stops: {reason}",
    "complete": "it is complete",
}
"""Events of events.jsonl that are shown, by type."""

_Moment = tuple[float, float]
"""Unix time of an event, and the seconds that were lost before it."""


class _Lines:
    """Reads the new whole lines of a growing file of JSON objects."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._head = b""

    def is_another_file(self) -> bool:
        """Return whether the file was replaced, or has lost lines that were read."""
        # Do not compare inodes, because a new file may reuse one. If the file is missing, keep the lines that
        # were read.
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            begins_alike = file.read(len(self._head)) == self._head
            return not begins_alike or file.seek(0, os.SEEK_END) < self._offset
        return False

    def read(self) -> Iterator[dict[str, Any]]:
        with contextlib.suppress(OSError), self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read(_MOST_BYTES)
            # The last line may be incomplete. Read it when its end is written.
            data = data[: data.rfind(b"\n") + 1]
            self._offset += len(data)
            self._head = (self._head + data)[:_HEAD_BYTES]
            for line in data.splitlines():
                with contextlib.suppress(ValueError):
                    found = json.loads(line)
                    if isinstance(found, dict):
                        yield found


class RunFiles:
    """Reads a run directory into ``history``, and returns the newest values as a status."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        names = (RunFile.EVENTS, RunFile.METRICS, RunFile.EVALUATION)
        self._events, self._metrics, self._evaluations = (
            _Lines(directory / one) for one in names
        )
        self._beginnings = Beginnings()
        self._steps_in_time, self._evaluations_in_time = (
            InTime(self._beginnings) for _ in range(2)
        )
        self._throughput = Throughput()
        self._last: Mapping[str, Any] = {}
        """The newest row of a step."""
        self._per_second: float | None = None
        self._newest: dict[str, Any] = {}
        """The newest event of each type."""
        self._last_type, self._last_event_at = "", 0.0
        self._restarts: dict[str, int] = {}
        self._lost_seconds: dict[str, float] = {}
        self._started: _Moment = (0.0, 0.0)
        self._saved: dict[int, _Moment] = {}
        """The newest saves by step, at most MOST_CHECKPOINTS."""
        self._is_stop_requested = False
        """Whether the newest process has stopped on request."""
        self.newest_time = 0.0
        """Unix time up to which the run is known: now, or the last event or step if the run has ended."""
        self.history = RunHistory(began_at=0.0)
        """Its times are Unix seconds until the first event gives the start of the run."""

    def is_another_run(self) -> bool:
        """Return whether the run was started again in an emptied directory, so that the lines that were read
        belong to a deleted run."""
        files = (self._events, self._metrics, self._evaluations)
        return any(one.is_another_file() for one in files)

    def look(self, now: float) -> dict[str, Any]:
        """Read new lines of the files, and return the status as of Unix time ``now``."""
        self._read_new_lines()
        last, per_second = self._last, self._per_second
        start = self._newest.get("start", {})
        total, step = start.get("total_steps"), last.get("step")
        phase, message = self._find_phase(now)
        left: float | None = None
        # A run that has ended keeps the time of its last event or step.
        if phase == "Running":
            self.newest_time = max(self.newest_time, now)
            if isinstance(total, int) and isinstance(step, int) and per_second:
                left = (total - step) * (last.get("tokens") or 0) / per_second
        age = round(max(0.0, now - last["time"]), 1) if "time" in last else None
        return {
            "run": str(start.get("run") or self._directory.name),
            "folder": self._directory.resolve().name,
            "phase": phase,
            "message": message,
            "worldSize": last.get("world_size", start.get("world_size", 0)),
            "step": step,
            "totalSteps": total,
            "loss": last.get("loss"),
            "tokensPerSecond": per_second,
            "etaSeconds": left,
            "checkpointStep": _saved_step(self._newest.get("save", {})),
            "restarts": dict(self._restarts),
            "lostSeconds": {
                cause: round(lost, 1) for cause, lost in self._lost_seconds.items()
            },
            "lastFailure": None,
            "updatedSecondsAgo": age,
        }

    def _read_new_lines(self) -> None:
        """Add the new lines of the files to the history."""
        # Read events first: they contain the start of the run, to which all other times are relative.
        for row in self._events.read():
            self._beginnings.note(row.get("type"), row.get("generation"), row.get("time"))
            self._note_event(row)
        for row in self._metrics.read():
            step = row.get("step")
            if not isinstance(step, int) or not _is_in_time(row, self._steps_in_time):
                continue
            self._last = row
            values = {name: row.get(name) for name in SHOWN}
            values |= dict(row.get("metrics") or {})
            if (per_second := self._add_tokens(row)) is not None:
                self._per_second = values["tokens_per_second"] = per_second
            self.history.steps.add(step, _numbers(values))
            self._note_size(row)
        # Limit the number of sets, because the history keeps a track of each set in memory.
        for row in self._evaluations.read():
            if not _is_in_time(row, self._evaluations_in_time):
                continue
            name, step = str(row.get("name")), row.get("step")
            tracks = self.history.evaluations
            if isinstance(step, int) and (name in tracks or len(tracks) < MOST_SETS):
                values = {"loss": row.get("loss"), **(row.get("metrics") or {})}
                tracks.setdefault(name, Track()).add(step, _numbers(values))

    def _add_tokens(self, row: Mapping[str, Any]) -> float | None:
        """Return the throughput at the end of a step; None if the row lacks one of the required numbers."""
        numbers: list[Any] = [
            row.get(one) for one in ("generation", "tokens", "step_seconds", "time")
        ]
        if not all(isinstance(one, int | float) for one in numbers):
            return None
        generation, tokens, seconds, time = numbers
        return self._throughput.add(
            generation=generation, tokens=tokens, step_seconds=seconds, time=time
        )

    def _note_event(self, row: dict[str, Any]) -> None:
        kind, at = str(row.get("type")), row.get("time")
        if not isinstance(at, int | float):
            return
        # If the clock is set back, use the time of the previous event, so that no elapsed time is negative.
        at = max(float(at), self._last_event_at)
        if not self.history.began_at:
            # Times of steps that were read before the first event have another origin.
            self.history.began_at, self.history.times = at, Track()
        elapsed = round(at - self.history.began_at, 1)
        self.newest_time = max(self.newest_time, at)
        # A start after the first one is a restart, unless a stop was requested before it. A change of the
        # world is a restart, too, and its event contains the lost time.
        cause = str(row.get("cause") or "process_started")
        is_resumed = kind == "start" and self._is_stop_requested
        if kind in ("start", "stop"):
            self._is_stop_requested = (
                kind == "stop" and row.get("reason") in REQUESTED_ENDINGS
            )
        if kind == "world" or (
            kind == "start" and "start" in self._newest and not is_resumed
        ):
            self._restarts[cause] = self._restarts.get(cause, 0) + 1
            lost = row.get("paused_seconds") or 0.0
            if kind == "start":
                lost = self._find_lost(row, at)
            self._lost_seconds[cause] = self._lost_seconds.get(cause, 0.0) + lost
        moment = at, sum(self._lost_seconds.values())
        if kind == "start":
            self._started = moment
        self._newest[kind], self._last_type, self._last_event_at = row, kind, at
        self._note_size(row)
        if kind == "save":
            step = _saved_step(row)
            self.history.checkpoints.add([elapsed, step])
            if isinstance(step, int):
                # A step that was saved before moves to the end, because the oldest save is dropped first.
                self._saved.pop(step, None)
                self._saved[step] = moment
            if len(self._saved) > MOST_CHECKPOINTS:
                del self._saved[next(iter(self._saved))]
        if kind in _TEXTS:
            with contextlib.suppress(KeyError):
                known = {key: str(value) for key, value in row.items()}
                text = _TEXTS[kind].format_map(known | {"cause": cause.replace("_", " ")})
                self.history.events.add([elapsed, kind, text[:300]])

    def _find_lost(self, start: Mapping[str, Any], at: float) -> float:
        """Return the seconds that a restart has lost: from the save that it resumes from to its start event.

        The previous process has trained the steps after that save in vain, whether it was killed or failed.
        """
        total = sum(self._lost_seconds.values())
        step = start.get("resumed_from", -1)
        # Without a save, all steps of the previous process are lost. If the save is not known, count from the
        # last event.
        since = self._started
        if isinstance(step, int):
            since = max(since, self._saved.get(step, (self._last_event_at, total)))
        # The time between may contain changes of the world, which are already counted.
        return max(0.0, at - since[0] - (total - since[1]))

    def _note_size(self, row: Mapping[str, Any]) -> None:
        at, size = row.get("time"), row.get("world_size")
        times = self.history.times
        if isinstance(at, int | float) and isinstance(size, int):
            elapsed = round(max(0.0, at - self.history.began_at), 1)
            # Clocks of two hosts may differ: leave out values that seem to be earlier.
            if not times.x or elapsed > times.x[-1]:
                times.add(elapsed, {"processes": size})

    def _find_phase(self, now: float) -> tuple[str, str]:
        """Return phase and message, as far as the files show them."""
        if (self._directory / RunFile.COMPLETE).exists():
            return "Complete", "all steps are trained"
        failed, end = self._newest.get("failed", {}), self._newest.get("end", {})
        if self._last_type == "failed" or (
            self._last_type == "end" and end.get("exit_code") in (64, 70)
        ):
            return "Failed", str(
                failed.get("message") or f"exit code {end.get('exit_code')}"
            )[:1000]
        if self._last_type in ("stop", "end"):
            reason = str(self._newest.get("stop", {}).get("reason") or "")
            return "Stopped", describe_ending(reason) or f"exit code {end.get('exit_code')}"
        if not self._newest:
            return "Waiting", "no process has written anything yet"
        # A killed process writes no end event, so show the time of its last step.
        if not self._last:
            return "Running", "no step is trained yet"
        age = max(0.0, now - self._last["time"])
        return "Running", f"its last step was {duration(age)} ago"


def _saved_step(save: Mapping[str, Any]) -> Any:
    """Return the step that was saved. The event's own step is the step at which a background save was
    reported."""
    step = step_of_checkpoint(str(save.get("checkpoint", "")))
    return save.get("step") if step is None else step


def _is_in_time(row: Mapping[str, Any], judge: InTime) -> bool:
    return judge.accepts(row.get("generation"), row.get("time"))


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the values that are numbers. A loss that is not finite is null in the file."""
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
