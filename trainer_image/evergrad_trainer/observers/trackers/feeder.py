"""Feeds one tracker from a separate thread, so that a slow, failing or hanging library does not delay steps.

The run's files are the source of the records. If a kill, a hang or a failure keeps records from a tracker,
the run's next feeder reads them from the files and shows them. A note next to the files contains the newest
step up to which all records are shown.
"""

import contextlib
import hashlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from evergrad_common.contract import CheckpointFile
from evergrad_common.metrics import Throughput
from evergrad_manifest.training import Tracker
from evergrad_manifest.values.urls import hide_credentials
from evergrad_trainer.base.lock import exclusive
from evergrad_trainer.base.records import RunInfo
from evergrad_trainer.observers.trackers.interface import End, Library, Shown, TrackedRun
from evergrad_trainer.observers.trackers.rows import (
    Record,
    advance,
    is_shown,
    read_missed,
    values_of,
)
from evergrad_trainer.run.directory import (
    RunDirectory,
    dumps_strict,
    read_json_object,
    write_atomically,
)

_log = logging.getLogger(__name__)

MOST_WAITING: Final = 10_000
"""Maximum number of records that wait for a library. Further records are not queued; a later start reads
them from the run's files and shows them."""
FLUSH_SECONDS: Final = 2.0
"""Seconds between two notes of the shown records. After a kill, the steps since the last note are read from
the run's files."""

OPENING_SECONDS: Final = 60.0
"""Maximum time to wait while another process opens the same tracker, because its library may hang."""

_LONGEST_FAILURE: Final = 500
"""Maximum number of characters of a library's error message. Some messages contain a server's whole
response."""

Opener = Callable[[TrackedRun], Library]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published, by its name."""

    checkpoint: str


@dataclass(frozen=True)
class TrackerFinish:
    """The last item of a feeder's queue."""

    end: End


Item = RunInfo | Record | Saved | TrackerFinish


class Feeder:
    """The thread that feeds one tracker, and its state for other threads."""

    def __init__(
        self,
        settings: Tracker,
        open_library: Opener,
        directory: RunDirectory,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        """The error that the library raised, as one line without credentials, or None."""
        self._settings = settings
        self._open_library = open_library
        self._directory = directory
        self._clock = clock
        self._folder = directory.trackers
        self._items: queue.Queue[Item] = queue.Queue(MOST_WAITING)
        self._busy_since: float | None = None
        self._is_done = threading.Event()
        self._abandoned = threading.Event()
        self._library: Library | None = None
        self._info: RunInfo | None = None
        self._shown = Shown()
        self._throughput = Throughput()
        # Checkpoints whose hash was noted. If retention removes such a checkpoint, it is not noted as gone.
        self._identified: set[str] = set()
        self._noted = Shown()
        self._flushed_at = 0.0
        self._thread = threading.Thread(
            target=self._live, name=f"evergrad-{settings.type}", daemon=True
        )
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """Seconds that the library has spent on the current record; 0 while the thread waits for the next."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def give(self, item: Item) -> bool:
        """Add an item to the queue without waiting; returns False if the queue is full."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` until the thread has ended; returns whether it has ended."""
        return self._is_done.wait(seconds)

    def abandon(self) -> None:
        """Stop writing. If the library hangs, the thread stops when the library's call returns."""
        self._abandoned.set()

    def _live(self) -> None:
        try:
            while not self._abandoned.is_set():
                # Take the next item, or none if a flush is due first.
                left = max(0.01, self._flushed_at + FLUSH_SECONDS - self._clock())
                has_news = self._shown != self._noted
                item: Item | None = None
                with contextlib.suppress(queue.Empty):
                    item = self._items.get(timeout=left if has_news else None)
                self._busy_since = self._clock()
                if item is not None:
                    self._show(item)
                if self._clock() - self._flushed_at >= FLUSH_SECONDS:
                    self._flush()
                self._busy_since = None
                if isinstance(item, TrackerFinish):
                    return
        except Exception as error:  # noqa: BLE001 - reported to the observer; ends only this tracker
            self.failure = describe_failure(error)
            _log.warning("tracker %s: %s", self._settings.type, self.failure)
        finally:
            self._busy_since = None
            self._is_done.set()

    def _show(self, item: Item) -> None:
        if isinstance(item, RunInfo):
            self._open(item)
        elif self._library is None:
            # The library was never opened, so there is no run to write to.
            return
        elif isinstance(item, Saved):
            # Retention may have removed it already.
            identity = self._identify(item.checkpoint)
            if identity or item.checkpoint not in self._identified:
                self._library.note(f"checkpoint/{item.checkpoint}", identity or "gone")
        elif isinstance(item, TrackerFinish):
            self._flush()
            if not self._abandoned.is_set():
                self._library.finish(item.end)
        else:
            self._write(item)

    def _open(self, info: RunInfo) -> None:
        """Open the library, or open it again if the run goes back to an earlier step; then show the missed
        records."""
        library, self._library = self._library, None
        if library is not None:
            library.finish("handed on")
        with self._alone():
            if self._abandoned.is_set():
                return
            library = self._library = self._open_library(self._describe(info))
            self._info, self._shown = info, library.shown
            # Write the note now: the library's id must survive a kill during the first step.
            self._write_note(library)

        for record in read_missed(self._directory, library.shown, newest=info.start_step):
            if self._abandoned.is_set():
                return
            # A long run takes time when it is shown for the first time. This must not look like a hang.
            self._busy_since = self._clock()
            self._write(record)

        # Flush before the notes, which can take long: if the process ends meanwhile, its rows are shown.
        self._flush()
        # A kill may have kept the newest checkpoint from the tracker, and a tracker that was added later has
        # no checkpoints. Note all existing checkpoints; to repeat a note does not change it.
        for manifest in sorted(
            self._directory.checkpoints.glob(f"step-*/{CheckpointFile.MANIFEST}")
        ):
            if self._abandoned.is_set():
                return
            self._busy_since = self._clock()
            if identity := self._identify(manifest.parent.name):
                self._identified.add(manifest.parent.name)
                library.note(f"checkpoint/{manifest.parent.name}", identity)

    def _identify(self, checkpoint: str) -> str | None:
        """Hash of a checkpoint's manifest, which has the checksum of each file; None if it cannot be read."""
        manifest = self._directory.checkpoints / checkpoint / CheckpointFile.MANIFEST
        try:
            return f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"
        except OSError:
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevent other processes of the run from opening this tracker at the same time.

        The previous rank 0 may still be opening it. If both found no run, both would create one.
        """
        type_, until = self._settings.type, self._clock() + OPENING_SECONDS

        def note_wait() -> None:
            # Waiting for the lock must not look like a hang.
            self._busy_since = self._clock()

        self._folder.mkdir(parents=True, exist_ok=True)
        with exclusive(
            self._folder / f".{type_}.lock",
            is_done=lambda: self._abandoned.is_set() or self._clock() > until,
            on_wait=note_wait,
        ) as is_alone:
            if not (is_alone or self._abandoned.is_set()):
                why = "the volume has no locks, or another process holds this one for long"
                _log.warning("tracker %s is opened without a lock: %s", type_, why)
            yield

    def _describe(self, info: RunInfo) -> TrackedRun:
        """Describe the run for its library."""
        type_ = self._settings.type
        noted = read_json_object(self._folder / f"{type_}.json") or {}
        if noted.get("run") != info.run_id:
            # The note belongs to another run whose directory was copied. This run is not shown yet.
            noted = {}
        # Trackers store the run's configuration as nested mappings.
        resolved = self._directory.read_resolved() or {}
        facts = {
            "run": info.name,
            "runId": info.run_id,
            "model": info.model,
            "parameters": info.parameters,
            "totalSteps": info.total_steps,
            "tokensPerStep": info.tokens_per_step,
        }
        facts |= {
            key: resolved[key]
            for key in ("configHash", "dataFingerprint")
            if key in resolved
        }
        training = resolved.get("manifest", {}).get("spec", {}).get("training", {})
        base = self._settings.directory
        default = self._folder / type_
        return TrackedRun(
            run_id=info.run_id,
            name=info.name,
            settings=self._settings,
            directory=default if base is None else Path(base) / info.name,
            facts={**facts, "training": training},
            start_step=info.start_step,
            own_id=str(noted.get("id", "")),
            noted=Shown(
                int(noted.get("step", 0)),
                {
                    str(name): int(step)
                    for name, step in noted.get("evaluations", {}).items()
                },
            ),
        )

    def _write(self, record: Record) -> None:
        library, info = self._library, self._info
        if library is None or info is None or is_shown(self._shown, record):
            return
        library.write(record.step, record.time, values_of(record, info, self._throughput))
        self._shown = advance(self._shown, record)

    def _flush(self) -> None:
        self._flushed_at = self._clock()
        if self._abandoned.is_set():
            return
        if self._library is not None and self._shown != self._noted:
            self._library.flush()
            self._write_note(self._library)

    def _write_note(self, library: Library) -> None:
        if self._abandoned.is_set():
            # The library has hung until now. Another feeder may show the run already, and owns the note.
            return
        shown, info = self._shown, self._info
        note = {
            "run": "" if info is None else info.run_id,
            "id": library.own_id,
            "step": shown.step,
            "evaluations": dict(shown.evaluations),
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self._settings.type}.json"
        write_atomically(path, dumps_strict(note) + "\n")
        self._noted = shown


def describe_failure(error: Exception) -> str:
    """Describe an error of a library in one line that is safe to store.

    Libraries name the address that they could not reach, and MLFLOW_TRACKING_URI may contain a password.
    """
    why = hide_credentials(" ".join(str(error).split()))
    return f"{type(error).__name__}: {why[:_LONGEST_FAILURE]}"
