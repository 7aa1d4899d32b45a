"""Weights & Biases tracker: one run with one id, through the package wandb; offline, a folder for
`wandb sync`.

It accepts no step that is older than its newest step, and keeps every value. If a step is trained twice, it
shows the first values. The records that it already shows are read from the server, or offline from the files
of earlier processes.
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
    """The wandb run to which one process writes."""

    def __init__(self, run: TrackedRun) -> None:
        # Set before wandb starts its process, which would send error reports.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb: Any = importlib.import_module("wandb")
        settings, is_online = run.settings, run.settings.mode == "online"
        run.directory.mkdir(parents=True, exist_ok=True)
        # Read the files before the library adds a new file.
        shown = Shown() if is_online else _read_shown(run.directory, run.run_id)
        options: dict[str, Any] = {"base_url": settings.url} if settings.url else {}
        if is_online:
            # At exit, this process waits for wandb's process, which retries sending until this timeout.
            options["finish_timeout"] = CLOSING_SECONDS
        self._run: Any = wandb.init(
            id=run.run_id,
            resume="allow",
            # Do not reuse another wandb run of this process, such as a run of a test.
            reinit="create_new",
            project=settings.project or DEFAULT_PROJECT,
            entity=settings.entity,
            name=run.title,
            tags=list(settings.tags),
            mode=settings.mode,
            dir=str(run.directory),
            # Collect neither console output, code nor host statistics.
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
            # The server reports the first step that it accepts.
            newest = int(getattr(self._run, "starting_step", 0) or 0) - 1
            shown = Shown(max(0, newest), {}, newest)
        self.shown = shown
        self._step = 0
        self._row: dict[str, float] = {}

    def write(self, step: int, time: float, values: Values) -> None:
        # Send a row only when it is complete, because evaluations are written after their step.
        if step != self._step:
            self._commit()
        self._step = step
        self._row.update(values)

    def note(self, name: str, text: str) -> None:
        self._run.summary[name] = text

    def flush(self) -> None:
        """Does nothing: the library writes in a separate process, and the next opening reads the result."""

    def finish(self, end: End) -> None:
        # Otherwise, the newest step may still get an evaluation. The server accepts no additions to a row, so
        # the process that continues the run sends the complete row.
        if end in ("complete", "stopped"):
            self._commit()
        self._run.finish(exit_code=1 if end == "failed" else 0)

    def _commit(self) -> None:
        if self._row:
            self._run.log(self._row, step=self._step, commit=True)
        self._row = {}


def _read_shown(directory: Path, run_id: str) -> Shown:
    """Read which records of the run are in the files of earlier processes."""
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
    """Yield the records of a transaction log: pieces in blocks of 32 KiB, as in LevelDB's log. After a kill,
    the last record may be incomplete.

    Format: https://github.com/google/leveldb/blob/main/doc/log_format.md, after a header of seven bytes.
    """
    if content[:4] != _MAGIC:
        return
    place, parts = _HEADER, b""
    while place + _HEADER <= len(content):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER:
            # The rest of the block is padding, because no header fits.
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        piece = content[place + _HEADER : place + _HEADER + length]
        if kind not in (1, 2, 3, 4) or len(piece) < length:
            return
        place += _HEADER + length
        # Kinds of pieces: 1 whole, 2 first, 3 middle, 4 last.
        parts = piece if kind in (1, 2) else parts + piece
        if kind in (1, 4):
            yield parts
