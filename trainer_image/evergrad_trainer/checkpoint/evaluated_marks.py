"""Marks of evaluated checkpoints: empty files in ``evaluated/``.

Retention keeps a limited number of checkpoints without a mark. The name of a mark contains the name of the
checkpoint and the first digits of its manifest's hash, because another checkpoint may have the name later.
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
    """Return the name of the mark of a checkpoint, such as ``step-1200.0123456789abcdef``."""
    digits = candidate.manifest.checksum[:_DIGITS] if candidate.manifest is not None else ""
    return f"{candidate.name}.{digits}"


def list_marks(directory: Path) -> set[str]:
    """Return the names of all marks in a ``checkpoints`` directory. Raises OSError."""
    return {path.name for path in list_entries(directory / EVALUATED)}


def write_marks(
    directory: Path, done: Sequence[Candidate], *, there: Sequence[Candidate]
) -> None:
    """Mark the ``done`` checkpoints as evaluated, and remove the marks of checkpoints that no longer exist.

    ``there`` are the existing checkpoints. Raises OSError if a mark cannot be written.
    """
    folder = directory / EVALUATED
    folder.mkdir(exist_ok=True)
    for one in done:
        (folder / mark_of(one)).touch()
    # Errors are ignored, because a mark without a checkpoint has no effect.
    known = {mark_of(one) for one in (*there, *done)}
    for name in list_marks(directory) - known:
        with contextlib.suppress(OSError):
            (folder / name).unlink(missing_ok=True)


def find_waiting(
    candidates: Sequence[Candidate], marks: Collection[str]
) -> list[Candidate]:
    """Return the readable checkpoints without a mark, oldest first.

    If a step has several checkpoints, only the newest of them is considered.
    """
    newest: dict[int, Candidate] = {}
    for one in candidates:
        step = one.version.step
        if one.manifest is not None and (
            step not in newest or newest[step].version < one.version
        ):
            newest[step] = one
    return [newest[step] for step in sorted(newest) if mark_of(newest[step]) not in marks]
