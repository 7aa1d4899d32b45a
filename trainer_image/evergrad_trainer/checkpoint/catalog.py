"""Lists the checkpoints of a directory, writes pointers, and quarantines or removes checkpoints (rank 0)."""

import contextlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evergrad_trainer.base.durable import fsync_directory, replace_durably
from evergrad_trainer.checkpoint import evaluated_marks, files, layout, leases
from evergrad_trainer.checkpoint.faults import RETENTION, FaultPoints
from evergrad_trainer.checkpoint.layout import Version, parse_checkpoint_name
from evergrad_trainer.checkpoint.manifest import (
    Candidate,
    InvalidCheckpointError,
    UnknownFormatError,
)
from evergrad_trainer.checkpoint.reader import CheckpointReader

_log = logging.getLogger(__name__)


class Catalog:
    """The published checkpoints of one directory.

    The methods raise OSError if an operation on the volume fails. Only rank 0 uses this class.
    """

    def __init__(
        self,
        directory: Path,
        *,
        reader: CheckpointReader,
        faults: FaultPoints,
        keep_waiting: int = 0,
    ) -> None:
        self._directory = directory
        self._reader = reader
        self._faults = faults
        self._keep_waiting = keep_waiting

    def scan(self) -> list[Candidate]:
        """Return all published checkpoints, valid or not, newest first; empty if there is no directory.

        Called at each start, for retention after each save, and by the commands that list checkpoints.
        """
        # Select by name alone, because a checkpoint with an unreadable manifest must be reported as damaged.
        names = {
            path.name
            for path in files.list_entries(self._directory)
            if parse_checkpoint_name(path.name)
        }
        hint = self.read_pointer(layout.LATEST)
        if hint is not None and (self._directory / hint).is_dir():
            names.add(hint)  # a listing on a network volume may be older than the hint
        return sorted(
            (self.describe(name) for name in names),
            key=lambda candidate: candidate.version,
            reverse=True,
        )

    def describe(self, name: str) -> Candidate:
        """Return the candidate for one published name, even if ``scan`` does not find the name."""
        named = parse_checkpoint_name(name) or Version(0, 0, 0)
        try:
            manifest = self._reader.read_manifest(name)
        except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
            return Candidate(name, named, None, str(error))
        return Candidate(name, manifest.version, manifest)

    def hold(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Prevent the removal of a checkpoint during the body, if possible.

        The checkpoint may have been removed since it was listed.
        """
        return leases.hold_if_possible(self._directory, name)

    def leased(self) -> set[str]:
        """Return the names of the checkpoints that readers outside the run hold. Raises OSError."""
        # Read the volume's clock by touching the directory, which works even if the volume is full.
        os.utime(self._directory)
        return leases.find_leased(self._directory, now=self._directory.stat().st_mtime)

    def waiting(self, candidates: Sequence[Candidate]) -> set[str]:
        """Return the names of the newest ``candidates`` without an evaluation, at most ``keep_waiting``.

        Raises OSError for a problem of the volume. As for leases, files of another user are only logged.
        """
        if not self._keep_waiting:
            return set()
        try:
            marks = evaluated_marks.list_marks(self._directory)
        except PermissionError as error:
            _log.warning(
                "retention waits for no evaluation: its marks cannot be read: %s", error
            )
            return set()
        return {
            one.name
            for one in evaluated_marks.find_waiting(candidates, marks)[
                -self._keep_waiting :
            ]
        }

    def set_aside(self) -> list[str]:
        """Return the names in quarantine."""
        return sorted(
            path.name for path in files.list_entries(self._directory / layout.QUARANTINE)
        )

    def quarantine(self, name: str) -> str:
        """Move a damaged checkpoint to the quarantine and return its new path, relative to the directory.

        If the name is already in quarantine, a number is appended, such as ``quarantine/step-1200~2``.
        """
        # A single rename, so that readers always find the whole checkpoint under one of the two names.
        (self._directory / layout.QUARANTINE).mkdir(exist_ok=True)
        return self._rename_into(layout.QUARANTINE, name)

    def note_fallback(self, fallback: Mapping[str, Any]) -> None:
        """Record a quarantined checkpoint and the reason until the run's events contain them.

        The process may be killed before it has written the event. The next start would not quarantine
        anything, so the event would be lost without this record.
        """
        noted = [*self.noted_fallbacks(), dict(fallback)]
        replace_durably(
            self._directory / layout.FALLBACKS, (json.dumps(noted) + "\n").encode()
        )

    def noted_fallbacks(self) -> list[dict[str, Any]]:
        """Return the recorded fallbacks, oldest first."""
        try:
            noted: Any = json.loads((self._directory / layout.FALLBACKS).read_bytes())
        except (OSError, ValueError):
            return []
        return [one for one in noted if isinstance(one, dict)]

    def forget_fallbacks(self) -> None:
        """Delete the recorded fallbacks, because the run's events contain them."""
        (self._directory / layout.FALLBACKS).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Delete a checkpoint.

        The checkpoint is first renamed into ``.trash/``. If the process is killed during the deletion, only
        files in the trash remain and never an incomplete checkpoint.
        """
        (self._directory / layout.TRASH).mkdir(exist_ok=True)
        trashed = self._rename_into(layout.TRASH, name)
        self._faults.reached(RETENTION, 0)
        # A network volume keeps files that another process has open. The remaining files are harmless.
        if not files.remove_tree(self._directory / trashed):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._directory / trashed,
            )

    def read_pointer(self, pointer: str) -> str | None:
        """Return the name in ``latest`` or ``best.json``, whether or not this checkpoint exists.

        Returns None if the pointer cannot be read or does not contain a valid name.
        """
        try:
            value: Any = json.loads((self._directory / pointer).read_bytes())
            name = value["checkpoint"]
        except (OSError, ValueError, TypeError, KeyError):
            return None  # pointers are only hints
        return name if isinstance(name, str) and parse_checkpoint_name(name) else None

    def write_pointer(self, pointer: str, name: str, version: Version) -> None:
        """Write the name of a checkpoint to ``latest`` or ``best.json``."""
        text = json.dumps({"checkpoint": name, **asdict(version)}) + "\n"
        replace_durably(self._directory / pointer, text.encode())

    def mark_best(self, step: int) -> None:
        """Write the name of the newest checkpoint of ``step`` to ``best.json``.

        Does nothing if there is no checkpoint of this step or if ``best.json`` already names one.
        """
        found = [one for one in self.scan() if one.version.step == step]
        if found and self.read_pointer(layout.BEST) not in {one.name for one in found}:
            self.write_pointer(layout.BEST, found[0].name, found[0].version)

    def _rename_into(self, folder: str, name: str) -> str:
        # The loop ends, because each iteration tries the next number and only a few names exist.
        number = 1
        while True:
            moved = f"{folder}/{name}" if number == 1 else f"{folder}/{name}~{number}"
            if files.rename_to_free_name(self._directory / name, self._directory / moved):
                fsync_directory(self._directory)
                return moved
            number += 1
