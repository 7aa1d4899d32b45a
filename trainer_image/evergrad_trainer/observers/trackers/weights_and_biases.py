"""Weights & Biases: one run under one id, by the wandb package; offline it is a folder for `wandb sync`.

It takes no step after a later one and forgets none, so that a step that was trained twice is shown as it was
trained first. The values that it shows are read from where they are: the server, or the files of earlier
processes.
"""

import importlib
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from evergrad_manifest.training.observing import DEFAULT_PROJECT
from evergrad_trainer.observers.trackers.interface import (
    CLOSING_SECONDS,
    End,
    Shown,
    TrackedRun,
    Values,
)

_log = logging.getLogger(__name__)

_BLOCK: Final = 32 * 1024
_MAGIC: Final = b":W&B"
_HEADER: Final = 7
"""Bytes before the first record of a file, and before each piece of a record."""


class WeightsAndBiases:
    """One process's part of a run."""

    def __init__(self, run: TrackedRun) -> None:
        # Before its process is started, which may report errors to its makers.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        settings, is_online = run.settings, run.settings.mode == "online"
        run.directory.mkdir(parents=True, exist_ok=True)
        # Read before the library adds a file of its own.
        shown = Shown() if is_online else _read_shown(run.directory, run.run_id)
        options: dict[str, Any] = {"base_url": settings.url} if settings.url else {}
        if is_online:
            # At its exit the process waits for wandb's own, which tries to send for as long as it may.
            options["finish_timeout"] = CLOSING_SECONDS
        self._run: Any = wandb.init(
            id=run.run_id,
            resume="allow",
            # Not the newest run of the process: tests and other programs may have one of their own.
            reinit="create_new",
            project=settings.project or DEFAULT_PROJECT,
            entity=settings.entity,
            name=run.title,
            tags=list(settings.tags),
            mode=settings.mode,
            dir=str(run.directory),
            # Nothing is collected that nobody has asked for: no console, no code, no statistics of the host.
            settings=wandb.Settings(
                console="off",
                silent=True,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                **options,
            ),
        )
        self._run.config.update(dict(run.facts), allow_val_change=True)
        self.own_id = run.run_id
        if is_online:
            # The server says from which step on it takes more.
            newest = int(getattr(self._run, "starting_step", 0) or 0) - 1
            shown = Shown(max(0, newest), {}, newest)
        self.shown = shown
        self._step = 0
        self._row: dict[str, float] = {}

    def write(self, step: int, time: float, values: Values) -> None:
        # A row is given away once it is whole: its evaluations come after its step.
        if step != self._step:
            self._commit()
        self._step = step
        self._row.update(values)

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def flush(self) -> None:
        """Do nothing: the library writes in a process of its own, and what it has is read at the next
        opening."""

    def finish(self, end: End) -> None:
        # The newest step may still get an evaluation: the process that goes on with the run shows it whole,
        # since a row that the server has takes nothing more.
        if end in ("complete", "stopped"):
            self._commit()
        self._run.finish(exit_code=1 if end == "failed" else 0)

    def _commit(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._step, commit=True)
        self._row = {}


def _read_shown(directory: Path, run_id: str) -> Shown:
    """The records of the run in the files of earlier processes."""
    records: Any = importlib.import_module("wandb.proto.wandb_internal_pb2")
    step, evaluations = 0, dict[str, int]()
    for path in sorted(directory.glob(f"wandb/offline-run-*/run-{run_id}.wandb")):
        for data in _read_records(path.read_bytes()):
            record = records.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") != "history":
                continue
            found = int(record.history.step.num)
            for item in record.history.item:
                name = item.key or "/".join(item.nested_key)
                kind, _, rest = name.partition("/")
                if kind == "train":
                    step = max(step, found)
                elif kind == "evaluation":
                    set_name = rest.partition("/")[0]
                    evaluations[set_name] = max(found, evaluations.get(set_name, -1))
    return Shown(step, evaluations)


def _read_records(content: bytes) -> Iterator[bytes]:
    """The records of a transaction log: pieces in blocks of 32 KiB, as in LevelDB's log. A kill may have cut
    off the last one.

    Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, after a header of seven bytes.
    """
    if content[:4] != _MAGIC:
        return
    place, parts = _HEADER, b""
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            # No header fits into the rest of a block: it is filled up.
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        piece = content[place + _HEADER : place + _HEADER + length]
        if kind not in (1, 2, 3, 4) or len(piece) < length:
            return
        place += _HEADER + length
        # Whole, first, middle, last.
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            yield parts
