"""Marks of checkpoints that were evaluated: empty files in ``evaluated/``. Retention leaves what has none.

A mark names the checkpoint and the beginning of its manifest's hash, because another checkpoint may have its
name later.
"""

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

from evergrad_trainer.checkpoint.files import list_entries
from evergrad_trainer.checkpoint.layout import EVALUATED
from evergrad_trainer.checkpoint.manifest import Candidate

_DIGITS: Final = 16


def mark_of(candidate: Candidate) -> str:
    """Name of a checkpoint's mark."""
    digits = candidate.manifest.checksum[:_DIGITS] if candidate.manifest is not None else ""
    return f"{candidate.name}.{digits}"


def list_marks(directory: Path) -> set[str]:
    """Names of all marks in a ``checkpoints`` directory. Raises OSError."""
    return {path.name for path in list_entries(directory / EVALUATED)}


def write_marks(
    directory: Path, done: Sequence[Candidate], *, there: Sequence[Candidate]
) -> None:
    """Mark checkpoints as evaluated, and remove marks of those that are not ``there`` any more. Raises
    OSError."""
    folder = directory / EVALUATED
    folder.mkdir(exist_ok=True)
    for one in done:
        (folder / mark_of(one)).touch()
    # A mark that stays behind does no harm.
    known = {mark_of(one) for one in (*there, *done)}
    for name in list_marks(directory) - known:
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def find_waiting(
    candidates: Sequence[Candidate], marks: Collection[str]
) -> list[Candidate]:
    """The readable checkpoints that wait for their evaluation, the oldest first: of several of one step the
    newest."""
    newest: dict[int, Candidate] = {}
    for one in candidates:
        step = one.version.step
        if one.manifest is not None and (
            step not in newest or newest[step].version < one.version
        ):
            newest[step] = one
    return [newest[step] for step in sorted(newest) if mark_of(newest[step]) not in marks]
