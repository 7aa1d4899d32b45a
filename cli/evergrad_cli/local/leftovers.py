"""Finds leftovers of complete runs on this machine in their directories, and removes them.

Reads only JSON and text files of the directory: it needs no torch and reads no tensors. Unknown files are
kept.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from evergrad_common.contract import CheckpointFile, RunFile

QUIET_SECONDS: Final = 600.0
"""Time without a write after which no process is assumed to work in the directory of a complete run. A reader
of a checkpoint renews its lease every 20 seconds, and an extended run logs each step."""
_REFERS_BACK: Final = ("two_stage_kl",)
"""Recipes for which an extended run reads a checkpoint that is not the newest."""


@dataclass(frozen=True)
class Leftover:
    """One possible leftover. If ``is_kept`` is true, it stays, and ``why`` has the reason.

    ``size``: a text; empty if unknown. ``uid`` and ``version``: identify an object of a cluster.
    """

    kind: str
    name: str
    why: str
    is_kept: bool = False
    size: str = ""
    size_bytes: int | None = None
    namespace: str = ""
    uid: str = ""
    version: str = ""


def find_runs(directory: Path) -> tuple[Path, ...]:
    """Return the run directories at ``directory``: the directory itself, or run directories directly in
    it."""
    try:
        is_run = (directory / RunFile.RESOLVED).is_file()
    # A directory that cannot be entered may be a run directory. The later search in it reports the reason.
    except PermissionError:
        is_run = True
    if is_run:
        return (directory,)
    return tuple(sorted(path.parent for path in directory.glob(f"*/{RunFile.RESOLVED}")))


def find_leftovers(
    directory: Path, *, keep: int, now: float, neighbours: Collection[Path] = ()
) -> Iterator[Leftover]:
    """Yield the leftovers of one run directory, including superseded files that are kept.

    ``keep``: number of the newest whole checkpoints that stay. ``now``: Unix seconds. ``neighbours``: other
    run directories, whose runs may have started from a checkpoint of this run. If a run cannot be read, all
    of it is kept.
    """
    try:
        found = list(_look_into(directory, keep=keep, now=now, neighbours=neighbours))
    # Pods write as another user. If this run cannot be read, the search must continue with other runs.
    except OSError as error:
        why = f"not all of it can be read: {error}"
        found = [Leftover("Run", str(directory), why, is_kept=True)]
    yield from found


def _look_into(
    directory: Path, *, keep: int, now: float, neighbours: Collection[Path]
) -> Iterator[Leftover]:
    """Yield the same as ``find_leftovers``. Raises OSError."""
    reason = _find_obstacle(directory, now=now, neighbours=neighbours)
    if reason:
        yield Leftover("Run", str(directory), reason, is_kept=True)
        return

    # List saves that were never published, and removals that were interrupted.
    checkpoints = directory / RunFile.CHECKPOINTS
    for folder, why in (
        (CheckpointFile.ATTEMPTS, "a save that did not finish"),
        (CheckpointFile.TRASH, "partly removed"),
    ):
        for path in sorted((checkpoints / folder).glob("*")):
            yield _leftover("Attempt", path, why)

    # Keep the newest whole checkpoints, and all checkpoints that are permanent or best.
    found = []
    for path in checkpoints.glob("step-*"):
        manifest = _read_whole(path) or {}
        # A checkpoint that lacks one of these three numbers cannot be ordered, so it is kept.
        version = [manifest.get(key) for key in ("step", "generation", "serial")]
        if all(isinstance(number, int) for number in version):
            found.append((version, path, manifest))
    found.sort(reverse=True, key=lambda one: one[0])
    best = _read_json(checkpoints / CheckpointFile.BEST).get("checkpoint")
    for position, (_, path, manifest) in enumerate(found):
        if position < max(keep, 1):
            continue
        extra = manifest.get("extra")
        mark = ""
        if isinstance(extra, Mapping) and extra.get(CheckpointFile.PERMANENT) is True:
            mark = "permanent (checkpoint.keepEvery)"
        elif manifest.get("best") is True or path.name == best:
            mark = "the best checkpoint, now or earlier"
        why = mark or f"superseded by {found[0][1].name}"
        yield _leftover("Checkpoint", path, why, is_kept=bool(mark))


def remove(path: Path) -> None:
    """Remove an attempt or a checkpoint. It is renamed first, so that a reader never finds half of a
    checkpoint.

    Raises OSError.
    """
    checkpoints = path.parent
    if checkpoints.name not in (CheckpointFile.ATTEMPTS, CheckpointFile.TRASH):
        trash = checkpoints / CheckpointFile.TRASH
        trash.mkdir(exist_ok=True)
        path = path.rename(trash / f"{path.name}.pruned-{os.getpid()}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _find_obstacle(directory: Path, *, now: float, neighbours: Collection[Path]) -> str:
    """Return why nothing may be removed from a run directory; empty if leftovers may be removed."""
    # A run that may continue may need any of its checkpoints, for example after a step that is not finite.
    if not (directory / RunFile.COMPLETE).is_file():
        return "the run is not complete"
    resolved = directory / RunFile.RESOLVED
    text = resolved.read_text(errors="replace")
    if any(recipe in text for recipe in _REFERS_BACK):
        return "its recipe takes an earlier checkpoint as a reference"
    recent = (
        directory / RunFile.METRICS,
        directory / RunFile.EVENTS,
        directory / RunFile.EVALUATION,
        *(directory / RunFile.CHECKPOINTS / CheckpointFile.LEASES).glob("*"),
    )
    if any(path.exists() and now - path.stat().st_mtime < QUIET_SECONDS for path in recent):
        return "it was written to, or read by an evaluation, in the last ten minutes"
    # Compare only the name: a path can be written in many ways, and keeping too much costs only space.
    for other in neighbours:
        try:
            if other == directory or (other / RunFile.COMPLETE).is_file():
                continue
            text = (other / RunFile.RESOLVED).read_text(errors="replace")
        except OSError as error:
            return f"{other.name} cannot be read, and may start from it: {error}"
        if directory.name in text:
            return f"{other.name}, which is not complete, refers to it"
    return ""


def _read_whole(checkpoint: Path) -> Mapping[str, Any] | None:
    """Return the manifest of a checkpoint if all its files exist with the right sizes, or None."""
    if checkpoint.is_symlink():
        return None
    manifest = _read_json(checkpoint / CheckpointFile.MANIFEST)
    files = manifest.get("files")
    if (
        manifest.get("format") != CheckpointFile.FORMAT
        or not isinstance(files, list)
        or not files
    ):
        return None
    # Sizes detect an incomplete copy. Hashes would require reading every file.
    for file in files:
        if not isinstance(file, Mapping):
            return None
        try:
            size = (checkpoint / str(file.get("name"))).stat().st_size
            if size != file.get("bytes"):
                return None
        except OSError:
            return None
    return manifest


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        raw = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, Mapping) else {}


def _leftover(kind: str, path: Path, why: str, *, is_kept: bool = False) -> Leftover:
    is_folder = path.is_dir() and not path.is_symlink()
    # Count links themselves and never follow them: their targets stay.
    files = path.rglob("*") if is_folder else (path,)
    size = sum(one.lstat().st_size for one in files if one.is_symlink() or one.is_file())
    return Leftover(kind, str(path), why, is_kept=is_kept, size_bytes=size)
