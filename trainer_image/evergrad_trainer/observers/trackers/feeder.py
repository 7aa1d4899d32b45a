"""Feeds one tracker in a thread of its own, so that a library that is slow, fails or hangs costs no step.

The run's own files decide what is shown: whatever a kill, a hang or a failure has kept from a tracker,
the next feeder of the run reads there and shows. A note beside the files says up to where everything is
shown.
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
"""Records that wait for a library: more are left to the run's files, from which a later start shows them."""
FLUSH_SECONDS: Final = 2.0
"""Between two notes of what is shown: a kill has the steps since then read from the run's files."""

OPENING_SECONDS: Final = 60.0
"""How long an opening waits for that of another process, whose library may hang in it."""

_LONGEST_FAILURE: Final = 500
"""Characters of what a library has raised: some put whole answers of a server into it."""

Opener = Callable[[TrackedRun], Library]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was published, by its name."""

    checkpoint: str


@dataclass(frozen=True)
class TrackerFinish:
    """The last thing that a feeder is given."""

    end: End


Item = RunInfo | Record | Saved | TrackerFinish


class Feeder:
    """The thread, and what is known of it from outside."""

    def __init__(
        self,
        settings: Tracker,
        open_library: Opener,
        directory: RunDirectory,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.failure: str | None = None
        """The error that the library has raised, as one line without credentials."""
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
        # Checkpoints whose hash was noted: one that is removed behind that is not noted as gone.
        self._identified: set[str] = set()
        self._noted = Shown()
        self._flushed_at = 0.0
        self._thread = threading.Thread(
            target=self._live, name=f"evergrad-{settings.type}", daemon=True
        )
        self._thread.start()

    @property
    def busy_seconds(self) -> float:
        """How long the library has been at one record; 0 where it waits for the next."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    def give(self, item: Item) -> bool:
        """Hand an item over, and do not wait; False where too many wait already."""
        try:
            self._items.put_nowait(item)
        except queue.Full:
            return False
        return True

    def wait(self, seconds: float) -> bool:
        """Wait until everything is shown and let go of; whether it is."""
        return self._is_done.wait(seconds)

    def abandon(self) -> None:
        """Have it write nothing more, at the latest when its library answers."""
        self._abandoned.set()

    def _live(self) -> None:
        try:
            while not self._abandoned.is_set():
                # The next item; none where it is time for a flush first.
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
        except Exception as error:  # noqa: BLE001 - whatever a library raises is told to the observer, and ends the tracker alone
            self.failure = describe_failure(error)
            _log.warning("tracker %s: %s", self._settings.type, self.failure)
        finally:
            self._busy_since = None
            self._is_done.set()

    def _show(self, item: Item) -> None:
        if isinstance(item, RunInfo):
            self._open(item)
        elif self._library is None:
            # It was never opened: nothing has begun.
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
        """Open the library, or open it anew where the run goes back, and show what it has missed."""
        library, self._library = self._library, None
        if library is not None:
            library.finish("handed on")
        with self._alone():
            if self._abandoned.is_set():
                return
            library = self._library = self._open_library(self._describe(info))
            self._info, self._shown = info, library.shown
            # At once: the library's own id must outlive a kill in the very first step.
            self._write_note(library)

        for record in read_missed(self._directory, library.shown, newest=info.start_step):
            if self._abandoned.is_set():
                return
            # A long run that is shown for the first time takes its time, and does not hang.
            self._busy_since = self._clock()
            self._write(record)

        # Before notes, which may take long: a process that ends meanwhile has shown its rows.
        self._flush()
        # A kill may have kept the newest checkpoint from the tracker, and one that was added has none. All
        # that are there are noted: a note that is given again says the same.
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
        """Hash of a checkpoint's manifest, which has the checksum of each of its files; None without one."""
        manifest = self._directory.checkpoints / checkpoint / CheckpointFile.MANIFEST
        try:
            return f"sha256:{hashlib.sha256(manifest.read_bytes()).hexdigest()}"
        except OSError:
            return None

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other processes of the run from opening this tracker meanwhile.

        The rank 0 before this one may still be at it: two that find no run would make two of them.
        """
        type_, until = self._settings.type, self._clock() + OPENING_SECONDS

        def note_wait() -> None:
            # To wait is not to hang.
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
        """The run as its library gets to know it."""
        type_ = self._settings.type
        noted = read_json_object(self._folder / f"{type_}.json") or {}
        if noted.get("run") != info.run_id:
            # The note is another run's, whose directory was copied: this one is not shown yet.
            noted = {}
        # The configuration of the run that trackers keep, as nested mappings.
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
            # Its library has hung until now: another feeder may show the run by now, and keep the note.
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
    """An error of a library as one line that may be written down.

    Libraries name the address that they could not reach: that of MLFLOW_TRACKING_URI may have a password.
    """
    why = hide_credentials(" ".join(str(error).split()))
    return f"{type(error).__name__}: {why[:_LONGEST_FAILURE]}"
