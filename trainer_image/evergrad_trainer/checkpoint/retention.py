"""Decides which checkpoints are kept and which are removed. Pure: takes candidates and returns names."""

from collections.abc import Collection, Sequence

from evergrad_trainer.checkpoint.layout import Version
from evergrad_trainer.checkpoint.manifest import Candidate


def choose_best(candidates: Sequence[Candidate], pointer: str | None) -> str | None:
    """Return the name of the best checkpoint, or None.

    This is the newest of the checkpoints that were saved as the best and of ``pointer``, the name in
    ``best.json``. The manifests are considered because a process may be killed after it has published the new
    best checkpoint and before it has written the pointer.
    """
    marked = [
        candidate
        for candidate in candidates
        if candidate.name == pointer
        or (candidate.manifest is not None and candidate.manifest.best)
    ]
    return max(marked, key=_version).name if marked else None


def choose_removals(
    valid: Sequence[Candidate], *, keep: int, pinned: Collection[str]
) -> list[str]:
    """Return the names to remove, oldest first.

    The ``keep`` newest of the ``valid`` candidates and all ``pinned`` ones are kept. Pass only candidates
    that validate: damaged checkpoints do not count and are never removed. For example, with steps 100, 200
    and 300, ``keep=1`` and ``step-100`` pinned, the result is ``["step-200"]``.
    """
    # Oldest first, so that the newer checkpoints remain if the process is killed between two removals.
    ordered = sorted(valid, key=_version, reverse=True)
    return [
        candidate.name
        for candidate in reversed(ordered[keep:])
        if candidate.name not in pinned
    ]


def choose_next_removal(
    valid: Sequence[Candidate], *, pinned: Collection[str]
) -> str | None:
    """Return the oldest of the ``valid`` candidates that is not pinned, or None.

    ``choose_removals`` would remove this checkpoint next. The newest candidate is never returned, because a
    restart needs it.
    """
    ordered = sorted(valid, key=_version)
    return next((one.name for one in ordered[:-1] if one.name not in pinned), None)


def _version(candidate: Candidate) -> Version:
    return candidate.version
