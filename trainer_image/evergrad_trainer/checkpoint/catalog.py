"""Which checkpoints a directory holds, and what becomes of them: pointers, quarantine, removal. Rank 0's."""

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
    """The published names of one directory. Methods raise OSError for what the volume refuses."""

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
        """All published names, newest first, valid or not; none if the directory does not exist.

        Called at a start, after each save for retention, and by the commands that list checkpoints.
        """
        # By name alone: a manifest that cannot be read is damage, which is reported and not left out.
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
        """One published name, whether or not it is among those a scan finds."""
        named = parse_checkpoint_name(name) or Version(0, 0, 0)
        try:
            manifest = self._reader.read_manifest(name)
        except (InvalidCheckpointError, UnknownFormatError, OSError) as error:
            return Candidate(name, named, None, str(error))
        return Candidate(name, manifest.version, manifest)

    def hold(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Keep a checkpoint from being retired while it is read, where that is possible.

        It may have been retired since it was listed.
        """
        return leases.hold_if_possible(self._directory, name)

    def leased(self) -> set[str]:
        """Names that readers beside the run hold. Raises OSError."""
        # The volume's own clock, without a byte written: the volume may be full.
        os.utime(self._directory)
        return leases.find_leased(self._directory, now=self._directory.stat().st_mtime)

    def waiting(self, candidates: Sequence[Candidate]) -> set[str]:
        """Names of the newest ``candidates`` that were not evaluated yet, at most ``keep_waiting``.

        Raises OSError for trouble of the volume, and not for what belongs to another user, as for leases.
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
        """Names in quarantine."""
        return sorted(
            path.name for path in files.list_entries(self._directory / layout.QUARANTINE)
        )

    def quarantine(self, name: str) -> str:
        """Set a damaged checkpoint aside for inspection; its path from here on.

        A name that was set aside before gets a further number.
        """
        # One rename: readers see all of a checkpoint under the one name or under the other.
        (self._directory / layout.QUARANTINE).mkdir(exist_ok=True)
        return self._rename_into(layout.QUARANTINE, name)

    def note_fallback(self, fallback: Mapping[str, Any]) -> None:
        """Keep what was set aside, and why, until the run's events have it.

        The process that sets it aside may be killed before it has written an event, and what the next start
        finds is whole.
        """
        noted = [*self.noted_fallbacks(), dict(fallback)]
        replace_durably(
            self._directory / layout.FALLBACKS, (json.dumps(noted) + "\n").encode()
        )

    def noted_fallbacks(self) -> list[dict[str, Any]]:
        """What was noted and not forgotten yet, oldest first."""
        try:
            noted: Any = json.loads((self._directory / layout.FALLBACKS).read_bytes())
        except (OSError, ValueError):
            return []
        return [one for one in noted if isinstance(one, dict)]

    def forget_fallbacks(self) -> None:
        """The run's events have what was noted."""
        (self._directory / layout.FALLBACKS).unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Delete a checkpoint.

        It is renamed into ``.trash/`` first: a kill in between leaves rubbish, never half a checkpoint.
        """
        (self._directory / layout.TRASH).mkdir(exist_ok=True)
        trashed = self._rename_into(layout.TRASH, name)
        self._faults.reached(RETENTION, 0)
        # A network volume keeps files that somebody has open; what is left is rubbish and does no harm.
        if not files.remove_tree(self._directory / trashed):
            _log.warning(
                "%s: could not be removed entirely; the next start tries again",
                self._directory / trashed,
            )

    def read_pointer(self, pointer: str) -> str | None:
        """The name that ``latest`` or ``best.json`` holds, whether or not that checkpoint exists."""
        try:
            value: Any = json.loads((self._directory / pointer).read_bytes())
            name = value["checkpoint"]
        except (OSError, ValueError, TypeError, KeyError):
            return None  # a hint that cannot be read is no hint
        return name if isinstance(name, str) and parse_checkpoint_name(name) else None

    def write_pointer(self, pointer: str, name: str, version: Version) -> None:
        """Let ``latest`` or ``best.json`` name a checkpoint."""
        text = json.dumps({"checkpoint": name, **asdict(version)}) + "\n"
        replace_durably(self._directory / pointer, text.encode())

    def mark_best(self, step: int) -> None:
        """Let ``best.json`` name the newest checkpoint of ``step``, unless it names one of that step already;
        nothing where there is none."""
        found = [one for one in self.scan() if one.version.step == step]
        if found and self.read_pointer(layout.BEST) not in {one.name for one in found}:
            self.write_pointer(layout.BEST, found[0].name, found[0].version)

    def _rename_into(self, folder: str, name: str) -> str:
        # Ends: names set aside before are few, and each turn tries the next number.
        number = 1
        while True:
            moved = f"{folder}/{name}" if number == 1 else f"{folder}/{name}~{number}"
            if files.rename_to_free_name(self._directory / name, self._directory / moved):
                fsync_directory(self._directory)
                return moved
            number += 1
